"""The commands: parse, load settings, call what does the work. Heavy modules are imported by their command."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.launcher import leave_with_launcher
from opendiloco.logs import setup_logging
from opendiloco.options import (
    AddressFile,
    AnnounceMaddrs,
    Debug,
    Dtype,
    EvalRun,
    ExportCheckpoint,
    ExportOut,
    HfDir,
    HostMaddrs,
    Identity,
    ModelDir,
    Peer,
    Peers,
    Resume,
    Run,
    RunId,
    Set,
    SimulationOut,
    TaskDir,
    Tasks,
    spread_peers,
)

_SETTINGS = "`opendiloco settings` lists every setting with unit, default and description."
_ORDER = "Settings: defaults < TOML files < --set < options of their own such as --peers."

app = typer.Typer(
    help="Train a language model on many machines without a server: DiLoCo over a hivemind DHT.",
    epilog=_SETTINGS,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass
class State:
    """What main() needs to know of the command it ran."""

    debug: bool = False
    log_file: Path | None = None


@app.command(epilog=f"{_ORDER} {_SETTINGS}")
def bootstrap(
    context: typer.Context,
    host_maddrs: HostMaddrs = None,
    announce_maddrs: AnnounceMaddrs = None,
    identity: Identity = None,
    peers: Peers = None,
    peer: Peer = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for key and log. Default: none.")
    ] = None,
    address_file: AddressFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Run a DHT peer that does not train, for others to join through."""
    from opendiloco.settings import Flag, load_settings

    state = _state(context, debug)
    state.log_file = out / "log.txt" if out else None
    given = {
        "--host-maddr": ("swarm.host_maddrs", host_maddrs),
        "--announce-maddr": ("swarm.announce_maddrs", announce_maddrs),
        "--identity": ("swarm.identity", identity),
        "--peers": ("swarm.peers", peers),
    }
    flags = [Flag(option, setting, value) for option, (setting, value) in given.items() if value not in (None, [])]
    settings = load_settings(None, peer, set_ or (), flags=flags)
    from opendiloco.bootstrap import run_bootstrap

    return run_bootstrap(settings.peer.swarm, out, address_file)


@app.command(epilog=f"{_ORDER} {_SETTINGS}")
def train(
    context: typer.Context,
    run: Run = None,
    peer: Peer = None,
    peers: Peers = None,
    run_id: RunId = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The worker's folder. Default: runs/RUN_ID."),
    ] = None,
    set_: Set = None,
    resume: Resume = None,
    address_file: AddressFile = None,
    debug: Debug = False,
) -> int:
    """Train as a worker: start a swarm, or join one with --peers.

    Without --run, a worker that joins takes the run contract from the swarm, and one that resumes and does not join the
    one in its folder. One that resumes keeps its own settings, too, without --peers, unless --peer or --set says else.
    """
    from opendiloco.settings import Flag, load_settings, settings_to_resume

    state = _state(context, debug)
    given = {"--peers": ("swarm.peers", peers), "--run-id": ("run.id", run_id)}
    flags = [Flag(option, setting, value) for option, (setting, value) in given.items() if value not in (None, [])]
    settings = load_settings(run, peer, set_ or (), flags=flags)
    folder = out or Path("runs") / settings.contract.run.id
    if resume is not None:
        settings = settings_to_resume(settings, folder, run, peer, set_ or (), flags=flags)
    state.log_file = folder / "log.txt"
    leave_with_launcher()
    from opendiloco.trainer import run_worker

    return run_worker(settings, folder, run_id=run_id, resume=resume, address_file=address_file)


@app.command(epilog=f"{_ORDER} {_SETTINGS}")
def simulate(
    context: typer.Context,
    workers: Annotated[
        int, typer.Option(metavar="K", min=1, help="Workers in the one process.", show_default=True)
    ] = 3,
    run: Run = None,
    peer: Peer = None,
    out: SimulationOut = Path("runs/simulate"),
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Train with K workers in one process and no network: the same algorithm, step by step."""
    from opendiloco.settings import load_settings

    _state(context, debug).log_file = out / "log.txt"
    settings = load_settings(run, peer, set_ or ())
    from opendiloco.simulate import run_simulation

    return run_simulation(settings.contract, settings.peer.compute, workers=workers, out=out)


@app.command("eval", epilog=f"{_ORDER} {_SETTINGS}")
def evaluate(
    context: typer.Context,
    model_dir: ModelDir,
    run: EvalRun = None,
    tasks: Tasks = None,
    task_dir: TaskDir = None,
    peer: Peer = None,
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Print validation loss (nats per token) and perplexity of a model, or what it scores in tasks of lm-eval."""
    from opendiloco.settings import load_settings

    _state(context, debug)
    beside = model_dir.absolute().parent / "run.toml"
    settings = load_settings(run or (beside if beside.is_file() else None), peer, set_ or ())
    with setup_logging(None, console=True):
        if tasks is not None:
            from opendiloco.harness import run_tasks

            return run_tasks(model_dir, tasks, task_dir=task_dir, compute=settings.peer.compute)
        from opendiloco.evaluate import run_eval

        return run_eval(model_dir, settings.contract.data, compute=settings.peer.compute)


@app.command()
def generate(
    context: typer.Context,
    model_dir: ModelDir,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="Above 0 samples; 0 takes the likeliest token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the sampling.")] = 0,
    debug: Debug = False,
) -> int:
    """Print text that a model writes after PROMPT."""
    _state(context, debug)
    with setup_logging(None, console=True):
        from opendiloco.evaluate import run_generate

        return run_generate(model_dir, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


@app.command()
def export(
    context: typer.Context,
    out_dir: ExportOut,
    hf_dir: HfDir,
    checkpoint: ExportCheckpoint = None,
    dtype: Dtype = "fp32",
    debug: Debug = False,
) -> int:
    """Write a worker's outer parameters as a Hugging Face folder: weights, tokenizer, config and model card."""
    _state(context, debug)
    with setup_logging(None, console=True):
        from opendiloco.export import run_export

        return run_export(out_dir, hf_dir, checkpoint=checkpoint, dtype=dtype)


@app.command("settings")
def settings_() -> int:
    """Print every setting with its default, description, unit and allowed values."""
    from opendiloco.settings import settings_help

    typer.echo(settings_help())
    return 0


@app.command()
def version() -> int:
    """Print the version."""
    from importlib import metadata

    typer.echo(f"opendiloco {metadata.version('opendiloco-p2p')}")
    return 0


# --- around every command --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (0, 64, 75 or 1); an error is one line on stderr."""
    state = State()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = typer.main.get_command(app)
    try:
        result = command.main(spread_peers(arguments), prog_name="opendiloco", standalone_mode=False, obj=state)
        return result if isinstance(result, int) else 0
    except OpendilocoError as error:
        _complain(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if isinstance(error, typer.BadParameter.__mro__[2]):  # every error of the command line itself
            return _complain_about_usage(error)
        return _complain_about_a_bug(error, state)


def _state(context: typer.Context, debug: bool) -> State:
    state = context.obj
    assert isinstance(state, State)
    state.debug = debug
    return state


def _complain(message: str) -> None:
    print(f"opendiloco: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _complain_about_usage(error: Exception) -> int:
    message = str(getattr(error, "message", "") or error)
    if callable(full_message := getattr(error, "format_message", None)):
        message = str(full_message())
    command = getattr(getattr(error, "ctx", None), "command_path", "opendiloco")
    _complain(f"{message.rstrip('.')}: see `{command} --help`")
    return SettingsError.exit_code


def _complain_about_a_bug(error: Exception, state: State) -> int:
    where = "run again with --debug for the traceback"
    if state.debug:
        traceback.print_exception(error)
        where = "the traceback is above"
    elif state.log_file is not None:
        with contextlib.suppress(OSError), state.log_file.open("a", encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
            where = f"the traceback is in {state.log_file}"
    _complain(f"unexpected {type(error).__name__}: {error}: {where}")
    return 1
