"""The local swarm of `./launch.sh`: one bootstrap peer, a few workers, live progress, a summary, a sample of text."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from opendiloco.errors import OpendilocoError, SettingsError, SwarmError
from opendiloco.metrics import MetricsReader
from opendiloco.settings import load_settings, write_toml

BOOTSTRAP_LIMIT_S = 60.0
STOP_LIMIT_S = 8.0  # Ctrl-C leaves nothing running after 10 s
POLL_S = 0.25
PROMPT = "def "
DEFAULTS = ("run.id=demo", "inner.steps=40", "inner.lr=0.001", "inner.warmup_steps=40", "rounds.deadline=60")


@dataclass
class Process:
    """A command of the swarm in its folder, with its output in a file there."""

    name: str
    folder: Path
    popen: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        """What it printed."""
        return (self.folder / "console.txt").read_text(errors="replace").strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 0 only if every round committed and all replicas are identical."""
    options, worker_arguments = _parse(argv)
    console = Console(stderr=True)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_interruptible())
            return _run(options, worker_arguments, console, stack)
    except KeyboardInterrupt:
        console.print("stopped; everything it started has ended")
        return 0
    except OpendilocoError as error:
        console.print(f"opendiloco: {error}", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code


def _run(options: argparse.Namespace, extra: list[str], console: Console, stack: contextlib.ExitStack) -> int:
    out = _fresh_folder(options.out)
    overrides = [*DEFAULTS, f"run.rounds={options.rounds}", f"rounds.start_peers={options.workers}"]
    overrides += [value for flag, value in itertools.pairwise(extra) if flag == "--set"]
    settings = load_settings(None, None, overrides)
    write_toml(out / "run.toml", settings.contract)
    console.print(
        f"1 bootstrap peer and {options.workers} workers in {out} (logs and metrics of each in its folder)",
        highlight=False,
        soft_wrap=True,
    )
    processes = _Processes(out)
    stack.callback(processes.stop)
    addresses = _start_bootstrap(processes, out / "bootstrap.addr")
    threads = max(1, (os.cpu_count() or 1) // options.workers)
    workers = []
    for index in range(options.workers):
        arguments = ["train", "--peers", *addresses, "--set", f"compute.threads={threads}", *extra]
        if index == 0:  # brings the run contract; the others take it from the swarm
            arguments += ["--run", str(out / "run.toml")]
        workers.append(processes.start(f"worker-{index}", arguments))
    readers = [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers]
    _watch(workers, readers, options.rounds, settings.contract.inner.steps, console)
    return _summarize(workers, [reader.events for reader in readers], options.rounds, console)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="launch.sh",
        allow_abbrev=False,
        description="Start a local swarm that trains a small Llama on the source text of Python's standard library.",
        epilog="Other arguments go to every worker, for example --set inner.steps=20. "
        "Other commands: launch.sh test | bench NAME | COMMAND (see launch.sh --help).",
    )
    parser.add_argument("--workers", type=_positive, default=3, metavar="K", help="workers to start (default 3)")
    parser.add_argument("--rounds", type=_positive, default=8, metavar="N", help="outer rounds to train (default 8)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default runs/demo")
    return parser.parse_known_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count of at least 1")
    return number


def _fresh_folder(out: Path) -> Path:
    """An empty folder; only what an earlier demo left there is removed."""
    if out.exists() and any(out.iterdir()):
        if not (out / "bootstrap").is_dir():
            raise SettingsError(f"--out {out} holds other files: name a folder of its own for the demo")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    return out.absolute()


class _Processes:
    """The commands this demo started, and their orderly end."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._started: list[Process] = []

    def start(self, name: str, arguments: list[str]) -> Process:
        """Run an `opendiloco` command in a session of its own, so that Ctrl-C reaches the demo only."""
        folder = self._out / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "console.txt").open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "opendiloco", *arguments, "--out", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        process = Process(name, folder, popen)
        self._started.append(process)
        return process

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left; the workers' guards remove what is below them."""
        for process in self._started:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + STOP_LIMIT_S
        for process in self._started:
            try:
                process.popen.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()


def _start_bootstrap(processes: _Processes, address_file: Path) -> list[str]:
    bootstrap = processes.start("bootstrap", ["bootstrap", "--address-file", str(address_file)])
    give_up = time.monotonic() + BOOTSTRAP_LIMIT_S
    while not address_file.exists():
        if bootstrap.popen.poll() is not None:
            raise SwarmError(f"the bootstrap peer ended: {bootstrap.output}")
        if time.monotonic() > give_up:
            raise SwarmError(f"the bootstrap peer was not up within {BOOTSTRAP_LIMIT_S:g} s: see {bootstrap.folder}")
        time.sleep(POLL_S)
    return address_file.read_text().split()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- what a person sees ----------------------------------------------------------------------------------


def _watch(
    workers: list[Process], readers: list[MetricsReader], rounds: int, inner_steps: int, console: Console
) -> None:
    """Show progress until all workers have ended, or one of them has failed."""
    shown = 0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            running = [worker for worker in workers if worker.popen.poll() is None]
            for reader in readers:
                reader.read()
            lines = _round_lines(readers[0].events)
            for line in lines[shown:]:
                console.print(line, highlight=False, soft_wrap=True)
            shown = len(lines)
            if console.is_terminal:
                live.update(_table(workers, readers, rounds, inner_steps), refresh=True)
            for worker in workers:
                if worker.popen.poll() not in (None, 0):
                    raise SwarmError(f"{worker.name} ended with exit code {worker.popen.returncode}: {worker.output}")
            if not running:
                return
            time.sleep(POLL_S)


def _table(workers: list[Process], readers: list[MetricsReader], rounds: int, inner_steps: int) -> Table:
    table = Table("worker", "peer", "round", "inner step", "loss", "tokens/s", "exchanged", box=None)
    for worker, reader in zip(workers, readers, strict=True):
        done = _of(reader.events, "round")
        steps = _of(reader.events, "inner_step")
        last = steps[-1] if steps else {}
        moved = sum(event["sent_bytes"] + event["received_bytes"] for event in done)
        table.add_row(
            worker.name,
            reader.events[0]["peer"][-8:] if reader.events else "starting",
            f"{min(len(done) + 1, rounds)}/{rounds}",
            f"{last.get('inner_step', 0)}/{inner_steps}",
            f"{last['loss']:.3f}" if last else "",
            f"{last['tokens_per_s']:,.0f}" if last else "",
            f"{moved / 1e6:.1f} MB",
        )
    return table


def _round_lines(events: list[dict[str, Any]]) -> list[str]:
    """One line per attempt at a round, as the first worker saw it."""
    return [
        f"round {event['round']} | {len(event['participants'])} workers | loss {event['loss']:.3f} | "
        f"inner {event['inner_s']:.1f} s, wait {event['wait_s']:.1f} s, rendezvous {event['rendezvous_s']:.2f} s, "
        f"all-reduce {event['allreduce_s']:.2f} s | {event['verdict']} | replica {str(event['params_hash'])[:12]}"
        for event in _of(events, "round")
    ]


def _summarize(workers: list[Process], events: list[list[dict[str, Any]]], rounds: int, console: Console) -> int:
    hashes = [{event["round"]: event["params_hash"] for event in _committed(of_worker)} for of_worker in events]
    all_committed = all(sorted(of_worker) == list(range(1, rounds + 1)) for of_worker in hashes)
    identical = all(of_worker == hashes[0] for of_worker in hashes)
    evaluations = _of(events[0], "eval")
    moved = [event["sent_bytes"] + event["received_bytes"] for of_worker in events for event in _committed(of_worker)]
    everything = [event for of_worker in events for event in of_worker]
    tokens = sum(event["tokens"] for of_worker in events for event in _committed(of_worker))
    elapsed_s = max(event["time"] for event in everything) - min(event["time"] for event in everything)
    before, after = evaluations[0], evaluations[-1]
    console.print(f"validation loss    {before['loss']:.3f} before, {after['loss']:.3f} after")
    console.print(f"rounds             {min(map(len, hashes))} of {rounds} committed by all {len(workers)} workers")
    console.print(f"bytes per round    {sum(moved) / max(1, len(moved)) / 1e6:.2f} MB sent and received per worker")
    console.print(f"training           {tokens:,} tokens in {elapsed_s:.0f} s")
    console.print(f"replicas identical: {'yes' if identical else 'no'}")
    folder = workers[0].folder / "model"
    command = [sys.executable, "-m", "opendiloco", "generate", str(folder), PROMPT, "--max-new-tokens", "160"]
    sample = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    console.print(f"\nsample after {PROMPT!r}:", highlight=False, soft_wrap=True)
    console.print(sample.stdout.rstrip() or sample.stderr.rstrip(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nmore of it: ./launch.sh generate {folder} 'import '", highlight=False, soft_wrap=True)
    return 0 if all_committed and identical and sample.returncode == 0 else 1


def _of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def _committed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in _of(events, "round") if event["verdict"] == "commit"]


if __name__ == "__main__":
    sys.exit(main())
