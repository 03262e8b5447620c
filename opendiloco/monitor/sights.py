"""What has been seen of the workers of a run, look after look: who is there, who has left or fallen silent.

Everything in it comes from other peers' records, of which those that cannot be of the run are passed over. Clocks come
in as arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opendiloco.claims import FOLLOW, MAX_LIFETIME_S, Progress, Seen, Told
from opendiloco.config import Contract

FORGET_S = 3600.0
"""After a worker's last record."""
MAX_WORKERS = 4096
RECENT = 6
"""Records by which a clock is judged."""


@dataclass(frozen=True)
class Sight:
    """One worker."""

    progress: Progress
    """What it said last."""
    until: float
    """When that expires or has expired, Unix seconds."""
    told: Told | None
    last_seen: float
    """When a look found a newer record than before, Unix seconds of this machine; at the first, when that was made."""
    lags: tuple[float, ...]
    """From the times of its newest `RECENT` records to the looks that found them."""

    @property
    def lag_s(self) -> float:
        """The least of those: below 0, its clock is ahead of this machine's."""
        return min(self.lags)

    def is_gone(self, now: float) -> bool:
        """Whether it has left, or its record has expired."""
        return self.progress.state == "left" or self.until < now

    def is_silent(self, now: float) -> bool:
        """Whether its record has expired without a word."""
        return self.progress.state != "left" and self.until < now


class Sights:
    """Everybody who has been seen in the last hour, by peer id."""

    def __init__(self) -> None:
        self.workers: dict[str, Sight] = {}

    def look(self, seen: Mapping[str, Seen], now: float, contracts: Sequence[Contract]) -> None:
        """Take in what a look at the DHT has found. `contracts` are those that it has for the run."""
        rounds = {contract.digest: contract.run.rounds for contract in contracts}
        for peer, found in seen.items():
            known, progress = self.workers.get(peer), found.progress
            if progress is not None and _can_be(progress, rounds):
                if known is None and len(self.workers) >= MAX_WORKERS:
                    continue
                known = self.workers[peer] = _after(known, progress, found.until, now)
            if known is not None and found.told is not None:
                told = _possible(found.told, min(known.progress.round + 1, rounds.get(known.progress.contract, 0)))
                self.workers[peer] = replace(known, told=told)
        self.workers = {
            peer: sight for peer, sight in self.workers.items() if max(sight.until, sight.last_seen) > now - FORGET_S
        }


def followed(contracts: Sequence[Contract], sights: Mapping[str, Sight], now: float) -> Contract:
    """The contract of most of those who are there; where nobody is, of most of those who were."""
    there = Counter(sight.progress.contract for sight in sights.values() if not sight.is_gone(now))
    all_of_them = Counter(sight.progress.contract for sight in sights.values())
    return max(contracts, key=lambda one: (there[one.digest], all_of_them[one.digest], one.digest))


def with_contract(sights: Mapping[str, Sight], digest: str) -> dict[str, Sight]:
    """Of all workers those who have it."""
    return {peer: sight for peer, sight in sights.items() if sight.progress.contract == digest}


def head_of(sights: Mapping[str, Sight]) -> Progress | None:
    """The record of the heaviest place that half of the workers have reached, those who catch up left aside.

    One of them may claim what it likes: the others pass it over where they cannot have that from it.
    """
    records = sorted((sight.progress for sight in sights.values()), key=lambda one: (one.committed_tokens, one.lineage))
    at_work = [record for record in records if record.state not in FOLLOW and record.round > 0] or records
    return at_work[len(at_work) // 2] if at_work else None


def _can_be(progress: Progress, rounds: Mapping[str, int]) -> bool:
    """Whether its contract, if that is known, has so many rounds."""
    most = rounds.get(progress.contract)
    return most is None or max(progress.round, progress.hashed_round) <= most


def _possible(told: Told, last: int) -> Told:
    """Without rounds after the `last`, which that worker cannot have done."""
    return told.model_copy(
        update={
            "rounds": [one for one in told.rounds if one.round <= last],
            "evaluations": [one for one in told.evaluations if one.round <= last],
        }
    )


def _after(known: Sight | None, progress: Progress, until: float, now: float) -> Sight:
    lag_s = now - progress.issued
    if known is None:
        made = min(now, max(progress.issued, now - MAX_LIFETIME_S))
        return Sight(progress, until, None, made, (lag_s,))
    if progress.session != known.progress.session:
        return Sight(progress, until, None, now, (lag_s,))
    if progress.issued <= known.progress.issued:
        return known
    return Sight(progress, until, known.told, now, (*known.lags, lag_s)[-RECENT:])
