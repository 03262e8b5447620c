"""Groups of peers, one per system, that take turns on one machine: how long an all-reduce takes and what comes out."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from benchmarks.baselines import Place, System, Timing, vector_sizes
from benchmarks.common import (
    BenchmarkError,
    PeerProcess,
    busy_s,
    compare,
    cores,
    exact_mean,
    fill,
    uninterrupted,
    wait_until_quiet,
)
from opendiloco.shared import create_shared_memory, map_vectors

HEAD_START_S = 0.1
"""For all peers to hear of a start."""
MAX_PROBLEMS = 5


@dataclass(frozen=True)
class Sample:
    """One all-reduce of one system."""

    seconds: float
    rendezvous_s: float
    sent_bytes: int | None
    """Of the peer that sent most."""
    relative_error: float
    """|average - exact mean| / |exact mean|, L2, of the first replica."""
    replica_difference: float
    """Largest difference of a value between replicas."""
    cpu_s: dict[str, float]
    """Of all processes of the system, by kind."""
    others_share: float
    """Of the machine's CPU time, that everything else took meanwhile."""

    @property
    def allreduce_s(self) -> float:
        """The step without the rendezvous."""
        return self.seconds - self.rendezvous_s


@dataclass
class Cell:
    """All repetitions of one system with one number of workers and values."""

    system: System
    workers: int
    values: int
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Of all-reduces that did not average the whole group, and were repeated."""

    def each(self, name: str) -> list[float]:
        """A field of all samples."""
        return [getattr(sample, name) for sample in self.samples]

    def median(self, name: str) -> float:
        """Median over the repetitions."""
        return statistics.median(self.each(name))

    @property
    def cpu_s(self) -> dict[str, float]:
        """Median CPU seconds of one all-reduce, by kind of process."""
        return {
            kind: statistics.median(sample.cpu_s.get(kind, 0.0) for sample in self.samples)
            for kind in self.samples[0].cpu_s
        }

    @property
    def bytes_per_value(self) -> tuple[float, str]:
        """Sent by one peer for each of its values, and where the number is from."""
        sent = [sample.sent_bytes for sample in self.samples if sample.sent_bytes is not None]
        if sent:
            return statistics.median(sent) / self.values, "measured"
        size = {"fp16": 2, "none": 4, "fp32": 4}[self.system.codec]
        return 2 * (self.workers - 1) / self.workers * size, "computed"


class Team:
    """All peers of one system."""

    def __init__(self, cell: Cell, memory: int, vectors: dict[str, Tensor], exact: Tensor) -> None:
        self.cell, self._exact = cell, exact
        self._results = [vectors[f"result {index}"] for index in range(cell.workers)]
        self._memory = memory
        self._peers: list[PeerProcess] = []

    def spawn(self) -> None:
        """Start the processes."""
        for index in range(self.cell.workers):
            threads = max(1, cores() // self.cell.workers)
            with uninterrupted():
                peer = PeerProcess("benchmarks.baselines", threads=threads, inherited=[self._memory])
                self._peers.append(peer)
            peer.send("place", Place(self.cell.system, index, self.cell.workers, self.cell.values, self._memory))

    def join(self) -> None:
        """Make the processes a group."""
        self._collect()
        self._peers[0].send("start", [])
        addresses = self._peers[0].receive()
        for peer in self._peers[1:]:
            peer.send("start", addresses)
        self._collect(self._peers[1:])
        self._call("join")

    def measure(self, *, patience_s: float) -> Sample:
        """One all-reduce, once the machine is quiet or `patience_s` seconds are over, and a look at its result."""
        while True:
            self._call("reset")
            wait_until_quiet(patience_s)
            before, busy, began = self._cpu_s(), busy_s(), time.monotonic()
            start_at = began + HEAD_START_S
            timings: list[Timing] = self._call("run", start_at)
            after, busy, took = self._cpu_s(), busy_s() - busy, time.monotonic() - began
            self._call("publish")
            problem = "; ".join(filter(None, (timing.problem for timing in timings)))
            if not problem:
                break
            self.cell.problems.append(problem)
            if len(self.cell.problems) > MAX_PROBLEMS:
                every = "\n  ".join(self.cell.problems)
                raise BenchmarkError(f"{self.cell.system.label}, {self.cell.workers} workers:\n  {every}")
        cpu = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
        error, difference = compare(self._results, self._exact)
        sent = [timing.sent_bytes for timing in timings if timing.sent_bytes is not None]
        return Sample(
            seconds=max(timing.ended for timing in timings) - start_at,
            rendezvous_s=max(timing.gathered for timing in timings) - start_at,
            sent_bytes=max(sent, default=None),
            relative_error=error,
            replica_difference=difference,
            cpu_s=cpu,
            others_share=max(0.0, busy - sum(cpu.values())) / took / (os.cpu_count() or 1),
        )

    def hang_up(self) -> None:
        """Ask all processes to end."""
        for peer in self._peers:
            peer.hang_up()

    def close(self) -> None:
        """Wait until all processes have ended."""
        for peer in self._peers:
            peer.close()

    def _call(self, method: str, *arguments: object) -> list[Any]:
        for peer in self._peers:
            peer.send(method, *arguments)
        return self._collect()

    def _collect(self, peers: Sequence[PeerProcess] | None = None) -> list[Any]:
        try:
            return [peer.receive() for peer in (self._peers if peers is None else peers)]
        except BenchmarkError as error:
            raise BenchmarkError(f"{self.cell.system.label}, {self.cell.workers} workers: {error}") from None

    def _cpu_s(self) -> dict[str, float]:
        by_peer = [peer.cpu_s() for peer in self._peers]
        return {kind: sum(used.get(kind, 0.0) for used in by_peer) for kind in sorted(set().union(*by_peer))}


def measure(systems: Sequence[System], *, workers: int, values: int, repetitions: int, patience_s: float) -> list[Cell]:
    """All systems side by side; a first round is not counted."""
    _say(f"{workers} workers, {values:,} values: starting {len(systems) * workers} peers")
    cells = [Cell(system, workers, values) for system in systems]
    memory = create_shared_memory()
    vectors = map_vectors(memory, vector_sizes(workers, values))
    own = [vectors[f"values {index}"] for index in range(workers)]
    for index, vector in enumerate(own):
        fill(vector, seed=index)
    exact = exact_mean(own)
    teams = [Team(cell, memory, vectors, exact) for cell in cells]
    with contextlib.ExitStack() as stack:
        stack.callback(_close, teams, memory)
        for team in teams:
            team.spawn()
        for team in teams:
            team.join()
        for team in teams:
            team.measure(patience_s=0)
        for repetition in range(repetitions):
            _say(f"{workers} workers, {values:,} values: repetition {repetition + 1} of {repetitions}")
            for index in range(len(teams)):
                team = teams[(repetition + index) % len(teams)]
                team.cell.samples.append(team.measure(patience_s=patience_s))
    return cells


def _close(teams: Sequence[Team], memory: int) -> None:
    with uninterrupted():
        for team in teams:
            team.hang_up()
        for team in teams:
            team.close()
        os.close(memory)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
