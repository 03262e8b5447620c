"""k workers in one process, no network: the same worker, inner and outer code; only the all-reduce is replaced.

It is the oracle of the tests: a real swarm with codec `none` follows it within fp32 rounding.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import blake3
import torch
from torch import Tensor

from opendiloco.averager import contribution_bytes
from opendiloco.codec import Codec, get_codec
from opendiloco.config import ComputeConfig, Contract, PeerConfig
from opendiloco.errors import SwarmError
from opendiloco.evaluation import EvaluationPart
from opendiloco.leases import Leases
from opendiloco.ledger import Reading
from opendiloco.logs import setup_logging
from opendiloco.metrics import MetricsLog
from opendiloco.outer import next_lineage
from opendiloco.phase import PhaseReport
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.settings import Settings, write_toml
from opendiloco.worker import Worker

T = TypeVar("T")

logger = logging.getLogger(__name__)


def run_simulation(contract: Contract, compute: ComputeConfig, *, workers: int, out: Path) -> int:
    """Train with simulated workers; the folders are those of a real swarm's workers."""
    with setup_logging(out / "log.txt", console=True):
        write_toml(out / "run.toml", contract)
        names = [f"worker-{index}" for index in range(workers)]
        finished = simulate(contract, compute, names, out)
        finished[0].save(out / "model", metrics=[out / name / "metrics.jsonl" for name in names])
    return 0


def simulate(contract: Contract, compute: ComputeConfig, names: Sequence[str], out: Path) -> list[Worker]:
    """Train one worker per name, each in a thread and a folder of its own; returns them after the last round.

    Args:
        names: peer ids; they decide which text a worker reads, as in a real swarm.
    """
    group = SimulatedGroup(names, get_codec(contract.outer.codec))
    settings = Settings(contract, PeerConfig(compute=compute))

    def work(name: str) -> Worker:
        try:
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            with MetricsLog(folder / "metrics.jsonl", name) as metrics:
                worker = Worker(settings, group.member(name), metrics, name=name)
                worker.train()
            return worker
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(len(names), thread_name_prefix="simulated worker") as threads:
        futures = [threads.submit(work, name) for name in names]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # the reason first, not what it did to the others
    return [future.result() for future in futures]


class SimulatedGroup:
    """Averages the members' pseudo-gradients once all of them have come, with the codec's losses both ways."""

    def __init__(self, names: Sequence[str], codec: Codec) -> None:
        self.names, self._codec = sorted(names), codec
        self._members = {name: SimulatedSwarm(self, name) for name in self.names}
        self._barrier = threading.Barrier(len(names), action=self._average)
        self._outcome = RoundOutcome(verdict="retry")
        self._lock = threading.Lock()
        self._parts: dict[str, dict[str, EvaluationPart]] = {}  # of evaluations, by lineage and name
        self._waiting: dict[str, list[Future[Mapping[str, EvaluationPart]]]] = {}

    def member(self, name: str) -> SimulatedSwarm:
        """The swarm as the worker of that name sees it."""
        return self._members[name]

    def arrive(self) -> RoundOutcome:
        """Wait for all members, then return what the round came to."""
        self._barrier.wait()
        return self._outcome

    def abort(self) -> None:
        """A member failed: let the others fail too instead of waiting for it."""
        self._barrier.abort()
        with self._lock:
            for future in [future for futures in self._waiting.values() for future in futures]:
                future.set_exception(SwarmError("another worker of this process has failed"))
            self._waiting.clear()

    def share_evaluation(
        self, name: str, part: EvaluationPart, peers: Sequence[str]
    ) -> Future[Mapping[str, EvaluationPart]]:
        """The parts of `peers`, once all of them are there."""
        future: Future[Mapping[str, EvaluationPart]] = Future()
        with self._lock:
            parts, waiting = self._parts.setdefault(part.lineage, {}), self._waiting.setdefault(part.lineage, [])
            parts[name] = part
            waiting.append(future)
            if self._barrier.broken:
                future.set_exception(SwarmError("another worker of this process has failed"))
            elif parts.keys() >= set(peers):
                for each in waiting:
                    each.set_result(parts)
                del self._parts[part.lineage], self._waiting[part.lineage]
        return future

    def _average(self) -> None:
        """The weighted mean in the order of the names, in fp32, encoded once (run by the last to arrive)."""
        everybody = [self._members[name] for name in self.names]
        members = [member for member in everybody if member.request.weight > 0]
        if not members:
            self._outcome = RoundOutcome(verdict="skip", reason="nobody contributes", live=len(everybody))
            return
        total = sum(member.request.weight for member in members)
        mean = torch.zeros_like(members[0].vectors["average"])
        for member in members:
            received = torch.empty_like(mean)
            self._codec.decode(contribution_bytes(member.vectors, self._codec), received)
            mean += received * member.request.weight
        encoded = self._codec.encode(mean.div_(total))
        for member in everybody:
            self._codec.decode(encoded, member.vectors["average"])
        self._outcome = RoundOutcome(
            verdict="commit",
            live=len(everybody),
            weights={member.peer_id: member.request.weight for member in members},
            tokens={member.peer_id: member.request.tokens for member in members},
            readings={member.peer_id: member.request.readings for member in members},
            digest=blake3.blake3(encoded.numpy().data).hexdigest(),
        )


class SimulatedSwarm:
    """An `Averager` that is one member of a `SimulatedGroup`."""

    def __init__(self, group: SimulatedGroup, name: str) -> None:
        self._group, self.peer_id = group, name
        self.vectors: dict[str, Tensor] = {}
        self.request = RoundRequest(weight=1.0, tokens=0)
        self._position = Position(0, "", "")
        self._leases = Leases(name)

    def leaving(self) -> bool:
        """Members of one process are told to leave by other ways."""
        return False

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """fp32 zeros by name."""
        self.vectors = {name: torch.zeros(size) for name, size in sizes.items()}
        return self.vectors

    def enter(self, contract: Contract, layout: str, position: Position) -> None:
        """All members are there from the start."""
        self._position = position

    def catch_up(self) -> Future[Recovery]:
        """All members are at the same place."""
        return _done(Recovery(self._position))

    def begin_phase(self, *, following: bool, steps: int) -> None:
        """Nobody to tell."""

    def wait_for_start(self) -> Future[int]:
        """All members are there from the start."""
        return _done(len(self._group.names))

    def report(self, report: PhaseReport) -> None:
        """Nobody to tell."""

    def lease(self, at: Reading | None, source: int, shards: int) -> Reading:
        """As in a swarm whose members all see each other."""
        others = dict.fromkeys((name for name in self._group.names if name != self.peer_id), ())
        return self._leases.lease(at, self._position.ledger, others, shards=shards, source=source)

    def average(self, request: RoundRequest) -> Future[RoundOutcome]:
        """Wait for the other members; the future is done."""
        self.request = request
        outcome = self._group.arrive()
        if outcome.verdict != "commit":
            return _done(outcome)
        before, weights = self._position, outcome.weights
        lineage = next_lineage(
            before.lineage,
            round=before.round + 1,
            weights=weights,
            tokens=outcome.tokens,
            readings=outcome.readings,
            average_digest=outcome.digest,
        )
        return _done(replace(outcome, lineage=lineage))

    def share_evaluation(self, part: EvaluationPart, peers: tuple[str, ...]) -> Future[Mapping[str, EvaluationPart]]:
        """As in a swarm in which no record gets lost."""
        return self._group.share_evaluation(self.peer_id, part, peers)

    def withdraw(self) -> None:
        """The members of one process leave together."""

    def awaited(self) -> str:
        """Members of one process come by themselves."""
        return "all workers are in this process"

    def committed(self, position: Position) -> None:
        """Nobody to tell."""
        self._position = position
        self._leases.settle(position.ledger)

    def set_params_hash(self, round: int, params_hash: str) -> None:
        """Nobody to tell."""


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
