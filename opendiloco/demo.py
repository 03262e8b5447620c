"""The local swarm of `./launch.sh`: one bootstrap peer, a few workers, live progress, a summary, a sample of text."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from opendiloco.errors import OpendilocoError, SettingsError, SwarmError
from opendiloco.machine import cores
from opendiloco.metrics import MetricsReader
from opendiloco.processes import Process, Processes, interruptible
from opendiloco.settings import Flag, Settings, load_settings, write_toml

BOOTSTRAP_LIMIT_S = 60.0
POLL_S = 0.25
TELL_LIMIT_S = 2.0  # how long a round's line waits for the others' losses
PROMPT = "def "
DEFAULTS = ("run.id=demo", "inner.steps=40", "inner.lr=0.001", "inner.warmup_steps=40", "rounds.grace=60")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 0 only if every round committed and all replicas are identical.

    A worker that dies once training has begun is the swarm's to survive: the others go on, and are judged.
    """
    console = Console(stderr=True)
    try:
        options = _parse(argv)
        with contextlib.ExitStack() as stack:
            stack.enter_context(interruptible())
            return _run(options, console, stack)
    except KeyboardInterrupt:
        console.print("stopped; everything it started has ended")
        return 0
    except OpendilocoError as error:
        console.print(f"opendiloco: {error}", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code


def _run(options: argparse.Namespace, console: Console, stack: contextlib.ExitStack) -> int:
    settings = _settings(options)
    out = _fresh_folder(options.out)
    write_toml(out / "run.toml", settings.contract)
    started = f"1 bootstrap peer and {options.workers} worker{'s' * (options.workers != 1)} in {out}"
    console.print(f"{started} (logs and metrics of each in its folder)", highlight=False, soft_wrap=True)
    processes = Processes(out)
    stack.callback(processes.stop)
    addresses = _start_bootstrap(processes, out / "bootstrap.addr")
    threads = max(1, cores() // options.workers)
    workers = []
    for index in range(options.workers):
        arguments = ["train", "--peers", *addresses, "--set", f"compute.threads={threads}", *_passed_on(options)]
        if index == 0:  # brings the run contract; the others take it from the swarm
            arguments += ["--run", str(out / "run.toml")]
        workers.append(processes.start(f"worker-{index}", arguments))
    readers = [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers]
    rounds = settings.contract.run.rounds
    _watch(workers, readers, rounds, settings.contract.inner.steps, console)
    return _summarize(workers, [reader.events for reader in readers], rounds, console)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch.sh",
        allow_abbrev=False,
        exit_on_error=False,
        description="Start a local swarm that trains a small Llama on the source text of Python's standard library.",
        epilog="Other commands: launch.sh test | bench NAME | COMMAND (see launch.sh --help).",
    )
    add = parser.add_argument
    add("--workers", type=_positive, default=3, metavar="K", help="workers to start (default 3)")
    add("--rounds", type=_positive, default=8, metavar="N", help="outer rounds to train (default 8)")
    place = "folder of the demo, which replaces what an earlier demo left there (default runs/demo)"
    add("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help=place)
    pass_on = parser.add_argument_group("options of every worker, as those of launch.sh train").add_argument
    pass_on("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    pass_on("--peer", type=Path, metavar="PEER.toml", help="the workers' own settings")
    pass_on("--run-id", metavar="NAME", help="name of the run (default demo)")
    pass_on("--debug", action="store_true", help="print the traceback of an unexpected error")
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SettingsError(f"{str(error).removeprefix('argument ')}: see ./launch.sh --help") from None
    if unknown:
        given = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(given, [f"--{name.replace('_', '-')}" for name in vars(options)], cutoff=0.8)
        cure = f"did you mean {near[0]}? " if near else ""
        raise SettingsError(f"{given} is no option of the demo: {cure}see ./launch.sh --help")
    return options


def _settings(options: argparse.Namespace) -> Settings:
    """The workers' settings; SettingsError for what they would end with, before anything is removed or started."""
    overrides = [*DEFAULTS, f"run.rounds={options.rounds}", f"rounds.start_peers={options.workers}", *options.set]
    flags = [Flag("--run-id", "run.id", options.run_id)] if options.run_id is not None else []
    settings = load_settings(None, options.peer, overrides, flags=flags)
    if options.set or options.peer is not None:
        from opendiloco.precheck import check_replica, check_texts  # seconds of importing

        check_texts(settings.contract.data)
        check_replica(settings.contract, settings.peer.compute)
    return settings


def _passed_on(options: argparse.Namespace) -> list[str]:
    """What every worker gets of the demo's command line."""
    arguments = [part for value in options.set for part in ("--set", value)]
    arguments += ["--peer", str(options.peer)] if options.peer is not None else []
    arguments += ["--run-id", options.run_id] if options.run_id is not None else []
    return arguments + ["--debug"] * options.debug


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a count of at least 1")


def _fresh_folder(out: Path) -> Path:
    """An empty folder; only what an earlier demo left there is removed."""
    if out.exists() and not out.is_dir():
        raise SettingsError(f"--out {out} is a file: name a folder")
    if out.exists() and any(out.iterdir()):
        if not (out / "bootstrap").is_dir():
            raise SettingsError(f"--out {out} holds other files: name a folder of its own for the demo")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    return out.absolute()


def _start_bootstrap(processes: Processes, address_file: Path) -> list[str]:
    bootstrap = processes.start("bootstrap", ["bootstrap", "--address-file", str(address_file)])
    give_up = time.monotonic() + BOOTSTRAP_LIMIT_S
    while not address_file.exists():
        if not bootstrap.is_running:
            raise SwarmError(f"the bootstrap peer ended: {bootstrap.output}")
        if time.monotonic() > give_up:
            raise SwarmError(f"the bootstrap peer was not up within {BOOTSTRAP_LIMIT_S:g} s: see {bootstrap.folder}")
        time.sleep(POLL_S)
    return address_file.read_text().split()


# --- what a person sees ----------------------------------------------------------------------------------


def _watch(
    workers: list[Process], readers: list[MetricsReader], rounds: int, inner_steps: int, console: Console
) -> None:
    """Show progress until all workers have ended; SwarmError when none is left, or one is lost before round 1."""
    shown: list[dict[str, Any]] = []
    lost: set[str] = set()
    have_joined = False
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            running = [worker for worker in workers if worker.is_running]
            for reader in readers:
                reader.read()
            if not have_joined and all(_of(reader.events, "join") for reader in readers):
                have_joined = True
                joined = "has joined and trains" if len(workers) == 1 else "have joined and train"
                console.print(f"{_all_of(len(workers))} {joined}", highlight=False)
            narrator = next((index for index, worker in enumerate(workers) if not worker.is_lost), 0)
            alive = {_peer(reader) for worker, reader in zip(workers, readers, strict=True) if worker.is_running}
            for event in _unseen(readers[narrator].events, shown):
                told = _told(event, readers)
                awaited = alive & set(event["participants"]) - {one["peer"] for one in told}
                if event["verdict"] == "commit" and awaited and time.time() < event["time"] + TELL_LIMIT_S:
                    break  # its line has the loss of all
                console.print(_round_line(event, told), highlight=False, soft_wrap=True)
                shown.append(event)
            if console.is_terminal:
                table = _table(workers, readers, rounds, inner_steps)
                starting = Text(_starting(workers, readers), no_wrap=True, overflow="ellipsis")
                live.update(Group(table, starting), refresh=True)
            for worker in (worker for worker in workers if worker.is_lost and worker.name not in lost):
                lost.add(worker.name)
                if len(lost) == len(workers) or not any(_committed(reader.events) for reader in readers):
                    raise SwarmError(f"{worker.name} {worker.end}: {worker.output}")
                console.print(f"{worker.name} {worker.end}: the others go on", highlight=False, soft_wrap=True)
            if not running:
                return
            time.sleep(POLL_S)


def _unseen(events: list[dict[str, Any]], shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Attempts at rounds that are still to be shown; another worker may have told of the earlier ones."""
    done = max((event["round"] for event in _committed(shown)), default=0)
    attempts = [event for event in _of(events, "round") if event["round"] > done]
    return attempts[sum(event["round"] > done for event in shown) :]


def _peer(reader: MetricsReader) -> str:
    return str(reader.events[0]["peer"]) if reader.events else ""


def _told(event: dict[str, Any], readers: list[MetricsReader]) -> list[dict[str, Any]]:
    """What the participants of a committed round have written about it."""
    of_round = [one for reader in readers for one in _committed(reader.events) if one["round"] == event["round"]]
    return [one for one in of_round if one["peer"] in event["participants"] and one["lineage"] == event["lineage"]]


def _table(workers: list[Process], readers: list[MetricsReader], rounds: int, inner_steps: int) -> Table:
    table = Table("worker", "peer", "round", "inner step", "loss", "tokens/s", "exchanged", box=None)
    for worker, reader in zip(workers, readers, strict=True):
        done = _of(reader.events, "round")
        steps = _of(reader.events, "inner_step")
        last = steps[-1] if steps and not worker.is_lost else {}
        moved = sum(event["sent_bytes"] + event["received_bytes"] for event in done)
        table.add_row(
            worker.name,
            _peer(reader)[-8:] or "starting",
            _last_seen(worker, reader) if worker.is_lost else f"{min(len(done) + 1, rounds)}/{rounds}",
            "" if worker.is_lost else f"{last.get('inner_step', 0)}/{inner_steps}",
            f"{last['loss']:.3f}" if last.get("loss") is not None else "",
            f"{last['tokens_per_s']:,.0f}" if last else "",
            f"{moved / 1e6:.1f} MB" if moved else "",
        )
    return table


def _last_seen(worker: Process, reader: MetricsReader) -> str:
    """How a worker ended that is lost, and when it was last heard of."""
    last = reader.events[-1]["time"] if reader.events else None
    return worker.end + (f", last seen {time.time() - last:.0f} s ago" if last is not None else "")


def _starting(workers: list[Process], readers: list[MetricsReader]) -> str:
    """The last words of workers that do not train yet: what a long start is about."""
    starting = [worker for worker, reader in zip(workers, readers, strict=True) if not reader.events]
    return "\n".join(f"{worker.name}: {words[-1]}" for worker in starting if (words := worker.output.splitlines()))


def _round_line(event: dict[str, Any], told: list[dict[str, Any]]) -> str:
    """One attempt at a round, as one worker saw it, with the mean loss of those who have `told` of its commit."""
    count = len(event["participants"])
    tokens = sum(one["tokens"] for one in told if one["loss"] is not None)
    loss = sum(one["loss"] * one["tokens"] / tokens for one in told if one["loss"] is not None and tokens)
    return (
        f"round {event['round']} | {count} worker{'s' * (count != 1)} | "
        + (f"loss {loss:.3f} | " if tokens else "")
        + f"inner {event['inner_s']:.1f} s, wait {event['wait_s']:.1f} s, rendezvous {event['rendezvous_s']:.2f} s, "
        f"all-reduce {event['allreduce_s']:.2f} s | {event['verdict']} | replica {str(event['params_hash'])[:12]}"
    )


def _all_of(workers: int) -> str:
    return {1: "the worker", 2: "both workers"}.get(workers, f"all {workers} workers")


def _summarize(workers: list[Process], events: list[list[dict[str, Any]]], rounds: int, console: Console) -> int:
    committed = [_committed(of_worker) for of_worker in events]
    hashes = [{event["round"]: event["params_hash"] for event in of_worker} for of_worker in committed]
    survivors = [index for index, worker in enumerate(workers) if not worker.is_lost]
    everything = [event for of_worker in events for event in of_worker]
    fewest = min(len(hashes[index]) for index in survivors)
    reference = hashes[survivors[0]]
    identical = all(of_worker.items() <= reference.items() for of_worker in hashes)
    evaluations = sorted(_of(everything, "eval"), key=lambda event: (event["round"], event["tokens"]))
    moved = [event["sent_bytes"] + event["received_bytes"] for of_worker in committed for event in of_worker]
    tokens = sum(event["tokens"] for of_worker in committed for event in of_worker)
    elapsed_s = max(event["time"] for event in everything) - min(event["time"] for event in everything)
    console.print(f"validation loss    {evaluations[0]['loss']:.3f} before, {evaluations[-1]['loss']:.3f} after")
    console.print(f"rounds             {fewest} of {rounds} committed by {_all_of(len(survivors))}", end="")
    lost = ", ".join(worker.name for worker in workers if worker.is_lost)
    console.print(f" that stayed ({lost} lost)" if lost else "")
    console.print(f"bytes per round    {sum(moved) / max(1, len(moved)) / 1e6:.2f} MB per worker, sent plus received")
    console.print(f"training           {tokens:,} tokens in {elapsed_s:.0f} s")
    console.print(f"replicas identical: {'yes' if identical else 'no'}")
    sampled = _show_sample(workers[survivors[0]].folder / "model", console)
    no_errors = all(worker.popen.returncode <= 0 for worker in workers)
    return 0 if fewest == rounds and identical and sampled and no_errors else 1


def _show_sample(model: Path, console: Console) -> bool:
    """Text from the trained model; whether that worked."""
    command = [sys.executable, "-m", "opendiloco", "generate", str(model), PROMPT, "--max-new-tokens", "160"]
    sample = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    console.print(f"\nsample after {PROMPT!r}:", highlight=False, soft_wrap=True)
    console.print(sample.stdout.rstrip() or sample.stderr.rstrip(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nmore of it: ./launch.sh generate {model} 'import '", highlight=False, soft_wrap=True)
    return sample.returncode == 0


def _of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def _committed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in _of(events, "round") if event["verdict"] == "commit"]


if __name__ == "__main__":
    sys.exit(main())
