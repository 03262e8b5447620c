"""What is not as it should be in a run, as its workers' records show it: each with the peers and what to do. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from opendiloco.claims import FOLLOW, Progress
from opendiloco.config import Contract
from opendiloco.monitor.sights import RECENT, Sight, followed, head_of, with_contract

Kind = Literal[
    "nobody", "contracts", "split", "replicas", "behind", "straggler", "clock", "silent", "ahead", "versions"
]

MAX_SKEW_S = 2.0
"""Between a worker's clock and this one. A DHT refuses records that are off by more than about three seconds."""
LATE_S = 10.0
"""After the usual expected finish, at least, for a straggler."""
LATE_SHARE = 0.25
"""Of an inner phase, as the last ones were, at least."""
BEHIND_ROUNDS = 2
MOST_TOLD = 4
"""Lineages or versions in a message."""


@dataclass(frozen=True)
class Trouble:
    """Something that whoever runs the swarm should look at."""

    kind: Kind
    message: str
    peers: tuple[str, ...] = ()


def troubles(contracts: Sequence[Contract], sights: Mapping[str, Sight], now: float) -> Iterator[Trouble]:
    """All that is wrong at this moment, the worst first."""
    everybody = {peer: sight for peer, sight in sorted(sights.items()) if not sight.is_gone(now)}
    contract = followed(contracts, sights, now).digest
    there = with_contract(everybody, contract)
    if not there:
        yield Trouble("nobody", "no worker is there")
    yield from _contracts(contracts, contract, everybody)
    yield from _splits(there)
    yield from _replicas(there)
    yield from _clocks(there)
    yield from _silent(with_contract(sights, contract), now)
    yield from _apart(there)
    yield from _stragglers(there, now)
    yield from _versions(there)


def _contracts(contracts: Sequence[Contract], usual: str, there: Mapping[str, Sight]) -> Iterator[Trouble]:
    if len(contracts) > 1:
        digests = ", ".join(sorted(contract.digest[:12] for contract in contracts))
        yield Trouble("contracts", f"the run has several contracts on this DHT ({digests}): choose another run.id")
    others = tuple(peer for peer, sight in there.items() if sight.progress.contract != usual)
    if others:
        yield Trouble("contracts", f"{_count(others)} another contract than most: they do not train together", others)


def _splits(there: Mapping[str, Sight]) -> Iterator[Trouble]:
    """Workers that have committed as many rounds, and not the same ones."""
    by_round: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for peer, sight in there.items():
        by_round[sight.progress.round][sight.progress.lineage].append(peer)
    for round, lineages in sorted(by_round.items(), reverse=True):
        if len(lineages) > 1:
            largest = sorted(lineages.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST_TOLD]
            shares = ", ".join(f"{lineage[:6]}: {len(peers)}" for lineage, peers in largest)
            shares += ", ..." if len(lineages) > MOST_TOLD else ""
            yield Trouble(
                "split",
                f"workers at round {round} are on {len(lineages)} lineages ({shares}): the heavier one wins when they "
                f"see each other",
                tuple(sorted(peer for peers in lineages.values() for peer in peers)),
            )
            return


def _replicas(there: Mapping[str, Sight]) -> Iterator[Trouble]:
    """Workers at the same place with another outer state: what must never be."""
    hashes: dict[tuple[int, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for peer, sight in there.items():
        record = sight.progress
        if record.hashed_round == record.round:
            hashes[record.round, record.lineage][record.params_hash].append(peer)
    for (round, _), found in sorted(hashes.items(), reverse=True):
        if len(found) > 1:
            fewest = min(found.values(), key=len)
            yield Trouble(
                "replicas",
                f"workers have different states after round {round}: start {_count(fewest, has=False)} of them again "
                f"with an empty folder (--out)",
                tuple(sorted(fewest)),
            )
            return


def _clocks(there: Mapping[str, Sight]) -> Iterator[Trouble]:
    for peer, sight in there.items():
        if sight.lag_s < -MAX_SKEW_S:
            yield Trouble(
                "clock", f"its clock is {-sight.lag_s:.0f} s ahead of this machine's: let NTP keep both", (peer,)
            )
        elif sight.lag_s > 2 * MAX_SKEW_S and len(sight.lags) == RECENT:  # found late, again and again
            yield Trouble(
                "clock", f"its clock is {sight.lag_s:.0f} s behind this machine's: let NTP keep both", (peer,)
            )


def _silent(sights: Mapping[str, Sight], now: float) -> Iterator[Trouble]:
    for peer, sight in sorted(sights.items()):
        if sight.is_silent(now):
            yield Trouble(
                "silent", f"it has not been heard of for {now - sight.last_seen:.0f} s and did not leave", (peer,)
            )


def _apart(there: Mapping[str, Sight]) -> Iterator[Trouble]:
    """Workers that are rounds away from most."""
    head = head_of(there)
    if head is None:
        return
    records = {peer: sight.progress for peer, sight in there.items()}
    late = tuple(peer for peer, record in records.items() if record.round <= head.round - BEHIND_ROUNDS)
    if late:
        yield Trouble("behind", f"{_count(late)} missed {BEHIND_ROUNDS} rounds or more, of {head.round}", late)
    ahead = tuple(
        peer
        for peer, record in records.items()
        if record.committed_tokens > head.committed_tokens and record.round >= head.round + BEHIND_ROUNDS
    )
    if ahead:
        said = (
            f"{_count(ahead)} {BEHIND_ROUNDS} rounds or more that most do not have: they are cut off, or it is no truth"
        )
        yield Trouble("ahead", said, ahead)


def _stragglers(there: Mapping[str, Sight], now: float) -> Iterator[Trouble]:
    """Workers whose phase ends long after that of most who are at the same round."""
    at_work: dict[str, dict[str, Progress]] = defaultdict(dict)
    for peer, sight in there.items():
        if sight.progress.state not in FOLLOW:
            at_work[sight.progress.lineage][peer] = sight.progress
    phases = [sight.told.rounds[-1].inner_s for sight in there.values() if sight.told and sight.told.rounds]
    late_s = max(LATE_S, LATE_SHARE * statistics.median(phases)) if phases else LATE_S
    for records in at_work.values():
        ends = [_end_of(record, now) for record in records.values() if record.state == "averaging" or record.steps > 0]
        usual = statistics.median_low(ends) if ends else math.inf
        for peer, record in records.items():
            behind_s = _end_of(record, now) - usual
            if record.state == "training" and behind_s > late_s:
                yield Trouble("straggler", f"its phase ends about {behind_s:.0f} s after the others'", (peer,))


def _end_of(record: Progress, now: float) -> float:
    """Of its inner phase: when it ended, or when it will. Before the first step nobody can say, and it is a guess."""
    return record.expected_finish if record.state == "averaging" else max(now, record.expected_finish)


def _versions(there: Mapping[str, Sight]) -> Iterator[Trouble]:
    counts = Counter(sight.told.version for sight in there.values() if sight.told)
    if len(counts) > 1:
        shares = ", ".join(f"{version}: {count}" for version, count in counts.most_common(MOST_TOLD))
        shares += ", ..." if len(counts) > MOST_TOLD else ""
        yield Trouble("versions", f"workers run different versions ({shares})")


def _count(peers: Sequence[str], *, has: bool = True) -> str:
    one = len(peers) == 1
    return f"{len(peers)} worker{'' if one else 's'}" + (f" {'has' if one else 'have'}" if has else "")
