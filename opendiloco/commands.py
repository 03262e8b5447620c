"""The commands: load settings, call what does the work. Heavy modules are imported by their command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opendiloco.errors import SettingsError
from opendiloco.launcher import leave_with_launcher
from opendiloco.logs import setup_logging
from opendiloco.options import (
    AddressFile,
    AnnounceMaddrs,
    AsJson,
    Debug,
    Dtype,
    EvalRun,
    ExportCheckpoint,
    ExportOut,
    HfDir,
    HistoryOut,
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
    Web,
    WorkerOut,
)

if TYPE_CHECKING:
    from opendiloco.settings import Flag

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
    out: WorkerOut = None,
    set_: Set = None,
    resume: Resume = None,
    address_file: AddressFile = None,
    debug: Debug = False,
) -> int:
    """Train as a worker: start a swarm, or join one with --peers.

    Without --run, a worker that joins takes the run contract from the swarm, and one that resumes and does not join the
    one in its folder. One that resumes keeps its own settings, too, without --peers, unless --peer or --set says else.
    """
    from opendiloco.settings import load_settings, settings_to_resume

    state = _state(context, debug)
    flags = _swarm_flags(peers, run_id)
    settings = load_settings(run, peer, set_ or (), flags=flags)
    folder = out or Path("runs") / settings.contract.run.id
    if resume is not None:
        settings = settings_to_resume(settings, folder, run, peer, set_ or (), flags=flags)
    state.log_file = folder / "log.txt"
    leave_with_launcher()
    from opendiloco.trainer import run_worker

    return run_worker(settings, folder, run_id=run_id, resume=resume, address_file=address_file)


@app.command(epilog=f"{_ORDER} {_SETTINGS}")
def monitor(
    context: typer.Context,
    peers: Peers = None,
    run_id: RunId = None,
    json: AsJson = False,
    web: Web = None,
    out: HistoryOut = None,
    peer: Peer = None,
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Show a run: who trains, how far it is, what is wrong. It reads the DHT only, and nobody waits for it."""
    from opendiloco.settings import load_settings

    _state(context, debug)
    settings = load_settings(None, peer, set_ or (), flags=_swarm_flags(peers, run_id))
    if json and web is not None:
        raise SettingsError("--json ends after one snapshot and --web serves a page: give one of them")
    from opendiloco.monitor.command import run_monitor

    return run_monitor(settings.peer.swarm, run_id=run_id, as_json=json, web=web, out=out)


@app.command(epilog=f"{_ORDER} {_SETTINGS}")
def doctor(
    context: typer.Context,
    run: Run = None,
    peer: Peer = None,
    peers: Peers = None,
    run_id: RunId = None,
    out: WorkerOut = None,
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Say whether this machine can take part: versions, ports, clock, memory, disk, bandwidth."""
    from opendiloco.settings import load_settings

    _state(context, debug)
    settings = load_settings(run, peer, set_ or (), flags=_swarm_flags(peers, run_id))
    from opendiloco.doctor import run_doctor

    return run_doctor(settings, out or Path("runs"), run_id=run_id)


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


def _swarm_flags(peers: list[str] | None, run_id: str | None) -> list[Flag]:
    from opendiloco.settings import Flag

    given = {"--peers": ("swarm.peers", peers), "--run-id": ("run.id", run_id)}
    return [Flag(option, setting, value) for option, (setting, value) in given.items() if value not in (None, [])]


def _state(context: typer.Context, debug: bool) -> State:
    state = context.obj
    assert isinstance(state, State)
    state.debug = debug
    return state
