"""The workers of one system on hosts of their own: rounds, and what they come to."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import CALL_LIMIT_S, PeerProcess, uninterrupted
from benchmarks.netns import NamespaceHost
from benchmarks.steps import Lap, Place, Plan, State, System

HEAD_START_S = 0.1
"""For all workers to hear of a start."""


@dataclass(frozen=True)
class Round:
    """One round of all workers."""

    seconds: float
    """Until the last worker had done with it."""
    laps: Sequence[Lap]
    carried_bytes: Sequence[int]
    """By each link, both ways."""
    identical: bool
    """Whether all workers had the same parameters after it."""

    @property
    def exchange_s(self) -> float:
        """What is not in the steps of the worker that spent most in them."""
        return self.seconds - max(lap.inner_s for lap in self.laps)

    @property
    def batches(self) -> int:
        """Of all workers."""
        return sum(lap.batches for lap in self.laps)


def utilization(rounds: Sequence[Round]) -> float:
    """Share of the workers' time that is in steps."""
    inner_s = sum(lap.inner_s for round in rounds for lap in round.laps)
    return inner_s / sum(round.seconds * len(round.laps) for round in rounds)


def seconds_to(target: float, losses: Sequence[float], seconds: Sequence[float]) -> float | None:
    """When the loss came down to `target`, on straight lines between rounds; None: it never did.

    Args:
        losses: before the first round and after each.
        seconds: of each round.
    """
    if losses[0] <= target:
        return 0.0
    passed = 0.0
    for (before, after), took in zip(itertools.pairwise(losses), seconds, strict=True):
        if after <= target:
            return passed + took * (before - target) / (before - after)
        passed += took
    return None


def problems(rounds: Sequence[Round]) -> Iterator[str]:
    """What workers say of rounds that did not average all of them."""
    for number, round in enumerate(rounds, 1):
        if said := next((lap.problem for lap in round.laps if lap.problem), ""):
            yield f"round {number}: {said}"


def summary(plan: Plan, rounds: Sequence[Round], losses: Sequence[float], *, target: float) -> dict[str, Any]:
    """What rounds came to. Args: `losses` as in `seconds_to`, of which `target` is to be reached."""
    if not rounds:
        return {"rounds": 0}
    batches, seconds = sum(round.batches for round in rounds), [round.seconds for round in rounds]
    tokens, exchanges = batches * plan.batch_tokens, [round.exchange_s for round in rounds]
    return {
        "rounds": len(rounds),
        "tokens": tokens,
        "seconds": sum(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "utilization": utilization(rounds),
        "bytes_per_token": sum(sum(round.carried_bytes) for round in rounds) / 2 / tokens,  # each byte on two links
        "carried_bytes_per_round": statistics.mean(max(round.carried_bytes) for round in rounds),
        "round_s": statistics.median(exchanges),
        "worst_s": max(exchanges),
        "compute_s": sum(lap.compute_s for round in rounds for lap in round.laps) / batches,
        "loss": losses[-1],
        "loss_reached_s": seconds_to(target, losses, seconds),
        "identical_rounds": sum(round.identical for round in rounds),
        "problems": list(problems(rounds)),
        "each": {"seconds": seconds, "exchange_s": exchanges, "loss": list(losses)},
    }


class Team:
    """The workers of one system, each on its host."""

    def __init__(self, system: System, plan: Plan, hosts: Sequence[NamespaceHost]) -> None:
        self._system, self._plan, self._hosts = system, plan, hosts
        self._workers: list[PeerProcess] = []
        self.rounds: list[Round] = []
        self.losses: list[float] = []
        """On the held-out text before the first round and after each."""

    @property
    def batches(self) -> int:
        """Of all workers in all rounds."""
        return sum(round.batches for round in self.rounds)

    def start(self) -> int:
        """Make processes and then a group of them; returns the number of parameters."""
        for index, host in enumerate(self._hosts):
            with uninterrupted():
                worker = PeerProcess(
                    "benchmarks.train_worker", threads=1, inherited=[self._plan.memory], prefix=host.prefix
                )
                self._workers.append(worker)
            worker.send("place", Place(self._system, self._plan, index, host.ip))
        parameters: int = self._collect(self._workers)[0]
        first, *others = self._workers
        addresses = self._call("start", [], workers=[first])[0]
        self._call("start", addresses, workers=others)
        self._call("join")
        self._look()
        return parameters

    def train(self, limit_s: float) -> None:
        """One round, which may take so long, and a look at the parameters after it."""
        carried = self._carried_bytes()
        start_at = time.monotonic() + HEAD_START_S
        laps: list[Lap] = self._call("train", start_at, limit_s=limit_s)
        carried = [after - before for before, after in zip(carried, self._carried_bytes(), strict=True)]
        seconds = max(lap.ended for lap in laps) - start_at
        self.rounds.append(Round(seconds, laps, carried, identical=self._look()))

    def close(self) -> None:
        """End all processes."""
        with uninterrupted():
            for worker in self._workers:
                worker.hang_up()
            for worker in self._workers:
                worker.close()

    def _look(self) -> bool:
        """Note the loss; whether all workers have the same parameters."""
        for index, worker in enumerate(self._workers):
            worker.send("look", index == 0)
        states: list[State] = self._collect(self._workers)
        assert states[0].loss is not None
        self.losses.append(states[0].loss)
        return len({state.params_hash for state in states}) == 1

    def _carried_bytes(self) -> list[int]:
        return [host.carried_bytes for host in self._hosts]

    def _call(
        self, method: str, *arguments: object, workers: Sequence[PeerProcess] = (), limit_s: float = CALL_LIMIT_S
    ) -> list[Any]:
        for worker in workers or self._workers:
            worker.send(method, *arguments)
        return self._collect(workers or self._workers, limit_s)

    def _collect(self, workers: Sequence[PeerProcess], limit_s: float = CALL_LIMIT_S) -> list[Any]:
        give_up = time.monotonic() + limit_s
        return [worker.receive(max(0.0, give_up - time.monotonic())) for worker in workers]
