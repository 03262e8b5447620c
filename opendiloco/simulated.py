"""A swarm of workers in one process: the all-reduce is replaced, the codec's losses are there both ways."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, TypeVar

import blake3
import torch
from torch import Tensor

from opendiloco.averager import contribution_bytes
from opendiloco.claims import News
from opendiloco.codec import Codec
from opendiloco.config import Contract
from opendiloco.errors import SwarmError
from opendiloco.evaluation import EvaluationPart
from opendiloco.leases import Leases
from opendiloco.ledger import Reading
from opendiloco.outer import next_lineage
from opendiloco.phase import PhaseReport
from opendiloco.plan import EVERYBODY, Plan
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest

STATE = ("theta", "momentum", "second_moment", "inner_first", "inner_second")
"""Vectors that a member takes from another one (see `averager.vector_sizes`)."""

T = TypeVar("T")


class SimulatedGroup:
    """Averages the members' pseudo-gradients once all of them have come, with the codec's losses both ways."""

    def __init__(self, names: Sequence[str], codec: Codec, plan: Plan = EVERYBODY) -> None:
        self.names, self._codec, self._plan = sorted(names), codec, plan
        self._members = {name: SimulatedSwarm(self, name) for name in self.names}
        self.round = 0
        """Rounds that the members have averaged in."""
        self._lock = threading.Lock()
        self._failed = False
        self._arrived = set[str]()
        self._outcome: Future[RoundOutcome] = Future()  # of the attempt that they arrive for
        self._donors: dict[int, Future[SimulatedSwarm]] = {}
        self._claims: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, dict[str, EvaluationPart]] = {}  # of evaluations, by lineage and name
        self._waiting: dict[str, list[Future[Mapping[str, EvaluationPart]]]] = {}

    def member(self, name: str, *, last: int | None = None) -> SimulatedSwarm:
        """The swarm as the worker of that name sees it, which leaves after the round `last`."""
        member = self._members[name]
        if member.vectors:  # of an earlier stay
            member = self._members[name] = SimulatedSwarm(self, name)
        member.last = last
        return member

    def present(self) -> list[str]:
        """Those who train for the next round."""
        return [name for name in self.names if self._plan.is_there(name, self.round + 1)]

    def claims(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shards that the others who are there had leased at the end of the last round."""
        return {other: self._claims.get(other, ()) for other in self.present() if other != name}

    def arrive(self, name: str) -> RoundOutcome:
        """Wait for all who are there, then return what the round came to."""
        with self._lock:
            if self._failed:
                raise AnotherFailedError()
            future = self._outcome
            self._arrived.add(name)
            is_lost = self._plan.is_lost(name, self.round + 1)
            if self._arrived.issuperset(self.present()):
                outcome = self._average()
                self._arrived, self._outcome = set(), Future()
                future.set_result(outcome)
        outcome = future.result()
        if is_lost and outcome.verdict == "commit":
            return RoundOutcome(verdict="resync", reason="it came too late", live=outcome.live)
        return outcome

    def committed(self, member: SimulatedSwarm) -> None:
        """A member holds the outer state of its position, and will until all who are there have come to a round."""
        with self._lock:
            self.round = max(self.round, member.position.round)
            donor = self._donors.setdefault(member.position.round, Future())
            if not donor.done():
                donor.set_result(member)

    def donor(self, round: int) -> Future[SimulatedSwarm]:
        """A member that holds the outer state after `round`, once there is one."""
        with self._lock:
            donor = self._donors.setdefault(round, Future())
            if self._failed and not donor.done():
                donor.set_exception(AnotherFailedError())
        return donor

    def abort(self) -> None:
        """A member failed: let the others fail too instead of waiting for it."""
        with self._lock:
            self._failed = True
            waiting: list[Future[Any]] = [self._outcome, *self._donors.values(), *chain(*self._waiting.values())]
            for future in waiting:
                if not future.done():
                    future.set_exception(AnotherFailedError())
            self._waiting.clear()

    def share_evaluation(
        self, name: str, part: EvaluationPart, peers: Sequence[str]
    ) -> Future[Mapping[str, EvaluationPart]]:
        """The parts of `peers`, once those of all who have not left are there."""
        future: Future[Mapping[str, EvaluationPart]] = Future()
        with self._lock:
            parts, waiting = self._parts.setdefault(part.lineage, {}), self._waiting.setdefault(part.lineage, [])
            parts[name] = part
            waiting.append(future)
            if self._failed:
                future.set_exception(AnotherFailedError())
            elif parts.keys() >= {peer for peer in peers if self._members[peer].last != self.round}:
                for each in waiting:
                    each.set_result(parts)
                del self._parts[part.lineage], self._waiting[part.lineage]
        return future

    def _average(self) -> RoundOutcome:
        """The weighted mean in the order of the names, in fp32, encoded once (run by the last to arrive)."""
        everybody = [self._members[name] for name in self.present()]
        counted = [each for each in everybody if not self._plan.is_lost(each.peer_id, self.round + 1)]
        members = [member for member in counted if member.request.weight > 0]
        if not members:
            return RoundOutcome(verdict="skip", reason="nobody contributes", live=len(everybody))
        total = sum(member.request.weight for member in members)
        mean = torch.zeros_like(members[0].vectors["average"])
        for member in members:
            received = torch.empty_like(mean)
            self._codec.decode(contribution_bytes(member.vectors, self._codec), received)
            mean += received * member.request.weight
        encoded = self._codec.encode(mean.div_(total))
        for member in counted:
            self._codec.decode(encoded, member.vectors["average"])
        self._claims = {member.peer_id: tuple(member.leases.claims) for member in everybody}
        self.round += 1
        before, digest = members[0].position, blake3.blake3(encoded.numpy().data).hexdigest()
        weights = {member.peer_id: member.request.weight for member in members}
        tokens = {member.peer_id: member.request.tokens for member in members}
        readings = {member.peer_id: member.request.readings for member in members}
        lineage = next_lineage(
            before.lineage,
            round=before.round + 1,
            weights=weights,
            tokens=tokens,
            readings=readings,
            average_digest=digest,
        )
        return RoundOutcome(
            verdict="commit",
            live=len(everybody),
            weights=weights,
            tokens=tokens,
            readings=readings,
            digest=digest,
            lineage=lineage,
        )


class SimulatedSwarm:
    """An `Averager` that is one member of a `SimulatedGroup`."""

    def __init__(self, group: SimulatedGroup, name: str) -> None:
        self._group, self.peer_id = group, name
        self.last: int | None = None
        """The round after which it leaves."""
        self.vectors: dict[str, Tensor] = {}
        self.request = RoundRequest(weight=1.0, tokens=0)
        self.position = Position(0, "", "")
        self.leases = Leases(name)

    def leaving(self) -> bool:
        """Whether the plan has it leave now."""
        return self.last is not None and self._group.round >= self.last

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """fp32 zeros by name."""
        self.vectors = {name: torch.zeros(size) for name, size in sizes.items()}
        return self.vectors

    def enter(self, contract: Contract, layout: str, position: Position) -> None:
        """Those of the first round are there from the start."""
        self.position = position
        self._group.committed(self)

    def catch_up(self) -> Future[Recovery]:
        """Take the outer state of a member that has it, if this one has missed rounds; the future is done."""
        missed = self._group.round - self.position.round
        if missed <= 0:
            return _done(Recovery(self.position))
        donor = self._group.donor(self._group.round).result()
        for name in STATE:
            self.vectors[name].copy_(donor.vectors[name])
        self.position = donor.position
        self.leases.settle(self.position.ledger)
        return _done(Recovery(self.position, (donor.peer_id,), full_state=missed > 1))

    def begin_phase(self, *, following: bool, steps: int) -> None:
        """Nobody to tell."""

    def wait_for_start(self) -> Future[int]:
        """All who are there begin together."""
        return _done(len(self._group.present()))

    def report(self, report: PhaseReport) -> None:
        """Nobody to tell."""

    def lease(self, at: Reading | None, source: int, shards: int) -> Reading:
        """As in a swarm whose members all see each other."""
        others = self._group.claims(self.peer_id)
        return self.leases.lease(at, self.position.ledger, others, shards=shards, source=source)

    def average(self, request: RoundRequest) -> Future[RoundOutcome]:
        """Wait for the other members; the future is done."""
        self.request = request
        return _done(self._group.arrive(self.peer_id))

    def share_evaluation(self, part: EvaluationPart, peers: tuple[str, ...]) -> Future[Mapping[str, EvaluationPart]]:
        """As in a swarm in which no record gets lost."""
        return self._group.share_evaluation(self.peer_id, part, peers)

    def withdraw(self) -> None:
        """The members of one process leave together."""

    def awaited(self) -> str:
        """Members of one process come by themselves."""
        return "all workers are in this process"

    def committed(self, position: Position) -> None:
        """From now on others may take its outer state."""
        self.position = position
        self.leases.settle(position.ledger)
        self._group.committed(self)

    def set_params_hash(self, round: int, params_hash: str) -> None:
        """Nobody to tell."""

    def tell(self, news: News) -> None:
        """Nobody looks."""


class AnotherFailedError(SwarmError):
    """What ends a worker whose group has lost another one."""

    def __init__(self) -> None:
        super().__init__("another worker of this process has failed")


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
