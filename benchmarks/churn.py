"""Random churn of a local swarm, from a seed: what happens to whom in which round, and how it is made to happen."""

from __future__ import annotations

import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.common import BenchmarkError
from benchmarks.links import Host, Links
from opendiloco.metrics import MetricsReader
from opendiloco.processes import Process, Processes

Action = Literal["start", "leave", "kill", "freeze", "cut", "drop"]
DISTURBANCES: tuple[Action, ...] = ("leave", "kill", "kill", "freeze", "cut", "drop")
PAUSES = (1.0, 8.0)  # seconds that a freeze or a cut lasts
ABSENCES = (2, 10)  # rounds between a worker's end and its next start
START_LIMIT_S = 60.0
LEAST = 3  # workers that are there when one is ended


@dataclass(frozen=True)
class Event:
    """Something that happens once `round` has been committed."""

    round: int
    action: Action
    worker: int
    seconds: float = 0.0
    """How long a freeze or cut lasts."""


def plan(*, rounds: int, workers: int, seed: int, every: int) -> list[Event]:
    """Events in order of their round: one disturbance in about `every` rounds, never below three workers.

    The last tenth of the rounds is quiet, so that the end shows whether everybody has recovered.
    """
    draw, up, events = random.Random(seed), set(range(workers)), list[Event]()
    back: dict[int, int] = {}
    for round in range(2, rounds - rounds // 10):
        for worker in [worker for worker, at in back.items() if at <= round]:
            del back[worker]
            up.add(worker)
            events.append(Event(round, "start", worker))
        if draw.random() * every >= 1 or len(up) < min(workers, 4):
            continue
        action, worker = draw.choice(DISTURBANCES), draw.choice(sorted(up))
        events.append(Event(round, action, worker, round_to(draw.uniform(*PAUSES))))
        if action in ("leave", "kill"):
            up.discard(worker)
            back[worker] = round + draw.randint(*ABSENCES)
    last = rounds - rounds // 10
    return [*events, *(Event(last, "start", worker) for worker in sorted(back))]


def round_to(seconds: float) -> float:
    """Tenths of a second are exact enough for a plan that people read."""
    return round(seconds, 1)


@dataclass
class Worker:
    """One worker of the soak, over all its lives."""

    name: str
    host: Host
    reader: MetricsReader
    process: Process | None = None
    started: list[float] = field(default_factory=list)
    ends_at: float = 0.0
    """When its freeze or cut ends; 0: it has none."""

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_running

    @property
    def is_there(self) -> bool:
        """Whether it is up and has joined the run."""
        return self.is_up and any(event["time"] > self.started[-1] for event in self.events("join"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.reader.events if event["event"] == kind]


class Churn:
    """A local swarm behind links, and everything that is done to it."""

    def __init__(self, out: Path, *, workers: int, contract: Path, sets: list[str]) -> None:
        """Args: `sets` are values of --set for every worker."""
        self._links, self._processes = Links(), Processes(out)
        self._out, self._contract, self._sets = out, contract, sets
        self.workers = [
            Worker(f"worker-{index}", self._links.host(), MetricsReader(out / f"worker-{index}" / "metrics.jsonl"))
            for index in range(workers)
        ]
        self.done: list[tuple[float, Event]] = []
        """What was done and when (Unix seconds); what could not be done, because the worker was not up, is missing."""

    def start_all(self) -> None:
        """Start the swarm: the first worker, and through it the others."""
        first = self.workers[0]
        self.start(first)
        give_up = time.monotonic() + START_LIMIT_S
        while not self._address_file(first).exists():
            if time.monotonic() > give_up or not first.is_up:
                raise BenchmarkError(f"the first worker is not up: {first.process and first.process.output}")
            time.sleep(0.1)
        for worker in self.workers[1:]:
            self.start(worker)

    def start(self, worker: Worker) -> None:
        """Start a worker, again with its old key, address and folder, through whoever has an address."""
        files = [self._address_file(other) for other in self.workers if other is not worker]
        peers = [address for file in files if file.exists() for address in file.read_text().split()]
        arguments = ["train", "--run", str(self._contract), "--address-file", str(self._address_file(worker))]
        arguments += ["--peers", *peers] if peers else []
        arguments += [part for value in (*self._sets, *worker.host.sets) for part in ("--set", value)]
        worker.started.append(time.time())
        worker.process = self._processes.start(worker.name, arguments)

    def apply(self, event: Event) -> None:
        """Make it happen, if the worker is there for it."""
        worker = self.workers[event.worker]
        if worker.is_up == (event.action == "start") or worker.ends_at:
            return
        if event.action in ("leave", "kill") and sum(each.is_there for each in self.workers) < LEAST:
            return  # others are still on their way back: without anybody the run itself would be gone
        self.done.append((time.time(), event))
        process = worker.process.popen if worker.process is not None else None
        if event.action == "start":
            self.start(worker)
        elif event.action == "drop":
            self._links.drop_connections(worker.host)
        elif event.action == "cut":
            worker.ends_at = time.monotonic() + event.seconds
            self._links.cut(worker.host, *(other.host for other in self.workers if other is not worker))
        elif process is not None:
            if event.action == "freeze":
                worker.ends_at = time.monotonic() + event.seconds
            number = {"leave": signal.SIGTERM, "kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[event.action]
            process.send_signal(number)

    def end_pauses(self, *, all_of_them: bool = False) -> None:
        """End the freezes and cuts whose time is over."""
        for worker in self.workers:
            if worker.ends_at and (all_of_them or time.monotonic() > worker.ends_at):
                worker.ends_at = 0.0
                self._links.mend(worker.host, *(other.host for other in self.workers if other is not worker))
                if worker.process is not None and worker.is_up:
                    worker.process.popen.send_signal(signal.SIGCONT)

    def _address_file(self, worker: Worker) -> Path:
        return self._out / f"{worker.name}.addr"

    def read(self) -> None:
        """Take in new lines of all metrics.jsonl."""
        for worker in self.workers:
            worker.reader.read()

    def resources(self) -> dict[str, dict[str, float]]:
        """Memory (MB), threads and descriptors of every worker that is up, its helper processes included."""
        return {worker.name: _resources(worker.process) for worker in self.workers if worker.process and worker.is_up}

    def stop(self) -> None:
        """End everything in order."""
        self.end_pauses(all_of_them=True)
        self._processes.stop()
        self._links.close()


def _resources(process: Process) -> dict[str, float]:
    total = {"rss_mb": 0.0, "threads": 0.0, "descriptors": 0.0}
    try:
        root = psutil.Process(process.popen.pid)
        for part in (root, *root.children(recursive=True)):
            with part.oneshot():
                total["rss_mb"] += part.memory_info().rss / 1e6
                total["threads"] += part.num_threads()
                total["descriptors"] += part.num_fds()
    except psutil.Error as error:
        print(f"{process.name}: {error}", file=sys.stderr)
    return total
