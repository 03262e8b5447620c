"""Pure decisions of a round: its key, who leads, who is waited for and how long, who reduces what, the verdict.

Nothing here touches the network or a clock; times are numbers that come in as arguments.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import blake3

from opendiloco.ledger import Ledger, Reading

Verdict = Literal["commit", "retry", "skip", "resync"]
RoundFate = Literal["committed", "elsewhere", "unknown", "undecided"]
"""Of a round on top of some lineage, at a peer: committed; that peer's round of this number is on another lineage; not
in its log; not known yet."""

USUAL_WORKERS, MAX_STRETCH = 16, 16.0
PART_VALUES = 256 * 1024  # most values of a part: 256 KB as int8, a tenth of a second at 20 Mbit/s
MIN_PART_VALUES = 16 * 1024
PARTS_OF_A_SLICE = 16  # at least, as far as MIN_PART_VALUES allows: the last one's average is all that has to wait
SLOW_SHARE = 0.5  # of the group's usual bandwidth: a peer with less reduces nothing
MIN_GRACE_S = 5.0
GRACE_SHARE = 0.5  # of an inner phase
SPREAD_FACTOR = 3.0
MAX_WAIT_FACTOR = 2.0  # times an inner phase
LATE_MARGIN_S = 1.0  # from having fetched a round to standing in the next one
LATE_FACTOR = 2.0  # times an all-reduce: a round that is fetched beside one takes as long
MIN_LIMIT_S = 30.0  # for an all-reduce, whatever its size
MIN_BYTES_PER_S = 125_000  # 1 Mbit/s: a group that is slower than this gives up


def group_key(*, run: str, contract: str, layout: str, lineage: str, round: int) -> str:
    """Peers average together only if all of this is equal."""
    text = "\n".join((run, contract, layout, lineage, str(round)))
    return blake3.blake3(text.encode(), derive_key_context="opendiloco group key").hexdigest()


def leader_order(key: str, peers: Collection[str]) -> tuple[str, ...]:
    """Who gathers the group, first choice first: the same for everybody, another peer every round."""
    return tuple(sorted(peers, key=lambda peer: blake3.blake3(f"{key}\n{peer}".encode()).digest()))


def quorum_size(live: int, share: float) -> int:
    """Fewest members that are more than `share` of `live` peers: two such groups cannot exist at once."""
    return math.floor(live * share) + 1


def stretch(workers: int) -> float:
    """How much longer beats and records last than in a small swarm.

    Everybody reads everybody's record at every beat: beyond `USUAL_WORKERS` the beat slows down as their number grows,
    so that what a worker reads stays what it is there.
    """
    return min(MAX_STRETCH, max(1.0, workers / USUAL_WORKERS))


@dataclass(frozen=True)
class Position:
    """Where a worker stands between two rounds."""

    round: int
    """Outer rounds committed."""
    lineage: str
    params_hash: str
    """Of the outer state; empty while it is being computed."""
    tokens: int = 0
    """Tokens that all participants trained on in the rounds of the lineage: its weight when two compete."""
    ledger: Ledger = field(default=Ledger(), compare=False)
    """How far they have read the text."""


@dataclass(frozen=True)
class Goal:
    """The heaviest lineage in sight, and who has it."""

    position: Position
    donors: tuple[str, ...]


def is_heavier(tokens: int, lineage: str, than_tokens: int, than_lineage: str) -> bool:
    """Whether one lineage wins over another: more committed tokens, ties by hash. Everybody decides the same."""
    return (tokens, lineage) > (than_tokens, than_lineage)


def joining_step(steps: Sequence[int], inner_steps: int) -> int:
    """Where in the inner phase a joiner begins, so that it is done with the others: their median; 0 without others."""
    return min(statistics.median_low(sorted(steps)), inner_steps - 1) if steps else 0


def joining_s(left: Sequence[float], deadline: float | Literal["adaptive"]) -> float:
    """For how long the others have been at an inner phase of fixed length, of which they have `left` seconds; or 0."""
    if deadline == "adaptive" or not left:
        return 0.0
    return min(deadline, max(0.0, deadline - statistics.median_low(left)))


@dataclass(frozen=True)
class RoundRequest:
    """What a worker brings to the end of an inner phase, besides its pseudo-gradient."""

    weight: float
    """Weight of its pseudo-gradient in the average; 0: it follows this round, and only takes the average."""
    tokens: int
    """Tokens it trained on in this round."""
    readings: tuple[Reading, ...] = ()
    """How far it has read the shards that it leased since the last round; the last one is where it is."""


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What one rendezvous and one all-reduce came to at a worker."""

    verdict: Verdict
    reason: str = ""
    """Why it is not a commit, or who dropped out of one."""
    live: int = 1
    """Live workers of this round, whether or not they took part."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Participants of a commit with their weights."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Participants of a commit with their tokens."""
    readings: Mapping[str, tuple[Reading, ...]] = field(default_factory=dict)
    """Participants of a commit, and how far they have read."""
    digest: str = ""
    """BLAKE3 of the averaged bytes."""
    lineage: str = ""
    """Lineage after the round, after a commit."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Peers that dropped out, and how it showed."""
    wait_s: float = 0.0
    """From this worker's arrival to that of the last one."""
    rendezvous_s: float = 0.0
    """From then to the start of the all-reduce."""
    allreduce_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    share: float = 0.0
    """Of the vector, that this worker averages for the others."""


@dataclass(frozen=True)
class Recovery:
    """How a worker got to where the swarm is."""

    position: Position
    donors: tuple[str, ...] = ()
    received_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    """Until the state was there and its hash confirmed."""
    rounds_replayed: int = 0
    full_state: bool = False
    """Whether theta and momentum were fetched, not only rounds that were missed."""
    given_up: int = 0
    """Rounds of this worker's own that are not on the lineage it moved to."""
    is_given_up_exact: bool = True
    """False: there may be more, from before the oldest round that logs tell of."""
    has_own_work: bool = False
    """Whether this worker's pseudo-gradient is in the first round that it missed: it must not count twice."""
    inner_step: int = 0
    """Where in its inner phase the swarm is."""
    phase_s: float = 0.0
    """Seconds for which that phase has been going on, where its length is fixed in seconds."""

    @property
    def is_mid_phase(self) -> bool:
        """Whether the swarm is in the middle of an inner phase."""
        return self.inner_step > 0 or self.phase_s > 0


@dataclass(frozen=True)
class Gathering:
    """What the leader of a round knows."""

    now: float
    """Clock of the leader, seconds."""
    arrived: Mapping[str, float]
    """When each peer that brings values arrived, on the leader's clock. Followers come and go without being counted."""
    expected: Mapping[str, float]
    """Live peers of this lineage that will bring values: when they expect to be done with their inner phase."""
    inner_s: float
    """Length of a usual inner phase, seconds; bounds the wait for stragglers."""
    gone: frozenset[str] = frozenset()
    """Peers that dropped out of this round before somebody's eyes: not waited for, but counted for the quorum."""
    late: Mapping[str, float] = field(default_factory=dict)
    """Live peers that fetch the round before, to follow this one: when they expect to have it."""
    exchange_s: float = 0.0
    """Length of a usual all-reduce, seconds; bounds the wait for those who are late."""


def start_time(gathering: Gathering, *, quorum: float, grace: float | Literal["adaptive"]) -> float | None:
    """When the group starts with those who are there; None while they are no quorum.

    At once when nobody is missing. Otherwise after the grace, which is either a fixed number of seconds after the
    first arrival, or follows the arrivals: their median plus a multiple of their spread, so that one straggler does
    not decide how long all others wait. Who is late is waited for if it can be there within the time of two exchanges:
    without that, a worker that needs longer to fetch a round than others to do a phase would stay a round behind.
    """
    start = _start_of_voters(gathering, quorum=quorum, grace=grace)
    if start is None:
        return None
    bound = max(gathering.arrived.values()) + max(MIN_GRACE_S, LATE_FACTOR * gathering.exchange_s)
    due = [at + LATE_MARGIN_S for peer, at in gathering.late.items() if peer not in gathering.gone]
    return max([start, *(at for at in due if at <= bound)])


def _start_of_voters(gathering: Gathering, *, quorum: float, grace: float | Literal["adaptive"]) -> float | None:
    arrived, expected = gathering.arrived, gathering.expected
    live = arrived.keys() | expected.keys()
    if not arrived or len(arrived) < quorum_size(len(live), quorum):
        return None
    missing = live - arrived.keys() - gathering.gone
    if not missing:
        return max(arrived.values())
    first = min(arrived.values())
    if grace != "adaptive":
        return first + grace
    times = sorted([*arrived.values(), *(max(expected[peer], gathering.now) for peer in missing)])
    median = statistics.median_low(times)
    spread = statistics.median_low(sorted(abs(time - median) for time in times))
    latest_useful = median + max(MIN_GRACE_S, GRACE_SHARE * gathering.inner_s, SPREAD_FACTOR * spread)
    bound = first + max(MIN_GRACE_S, MAX_WAIT_FACTOR * gathering.inner_s)
    return min(latest_useful, bound)


def reduce_shares(measured: Sequence[float | None]) -> tuple[float, ...]:
    """Share of the vector that each peer reduces: equal ones, but none of it for a peer whose link is slow.

    A peer of k moves (1 + (k - 2) * share) vectors each way, so one that reduces nothing saves up to half of its bytes
    and burdens others with them. A finer division would save little more, and measurements are noisy: a link counts as
    slow below half of what is usual. With two peers any split costs the same.

    Args:
        measured: bandwidth of each peer in bytes/s; 0 cannot reduce, None (not measured yet) counts as usual.
    """
    known = [bandwidth for bandwidth in measured if bandwidth]
    least = statistics.median_high(known) * SLOW_SHARE if known and len(measured) > 2 else 0.0
    able = [bandwidth is None or (bandwidth > 0 and bandwidth >= least) for bandwidth in measured]
    if not any(able):
        raise ValueError("no peer of the group can be reached, so nobody can reduce")
    return tuple(1 / sum(able) if is_able else 0.0 for is_able in able)


@dataclass(frozen=True)
class Part:
    """A range of the flat vector that travels and is averaged as one message."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Values in the part."""
        return self.stop - self.start


def plan_parts(numel: int, shares: Sequence[float], *, alignment: int) -> tuple[tuple[Part, ...], ...]:
    """Split `numel` values into one run of parts per reducer, proportional to `shares`.

    Slices begin at multiples of `alignment` (the codec's block), so that blocks never straddle two reducers.
    """
    total, reached, start = math.fsum(shares), 0.0, 0
    if numel and not total > 0:
        raise ValueError("no share of the vector is above 0, so nobody would reduce it")
    plan = []
    for index, share in enumerate(shares):
        reached += share
        last = not any(shares[index + 1 :])
        stop = numel if last else min(numel, round(numel * reached / total / alignment) * alignment)
        stop = max(stop, start) if share > 0 else start
        size = _part_values(stop - start, alignment)
        plan.append(tuple(Part(at, min(at + size, stop)) for at in range(start, stop, size)))
        start = stop
    return tuple(plan)


def _part_values(slice_values: int, alignment: int) -> int:
    share = -(-slice_values // (PARTS_OF_A_SLICE * alignment)) * alignment
    return min(PART_VALUES, max(MIN_PART_VALUES, share))


def time_limit_s(size: int) -> float:
    """Seconds after which an all-reduce that moves `size` bytes is given up."""
    return MIN_LIMIT_S + 2 * size / MIN_BYTES_PER_S


def verdict(
    voters: Collection[str], masks: Collection[frozenset[str]], missing_parts: int, *, quorum: int = 1
) -> Verdict:
    """What one all-reduce of values of `voters` comes to at a peer that got parts averaged over `masks`.

    Commit only with every part, all of them over the same peers: whoever is in the average is in all of it. Those
    peers must still be a quorum: a group that lost members may have left enough of them to form another one.
    """
    if missing_parts or len(set(masks)) > 1:
        return "retry"
    only = next(iter(set(masks)), frozenset(voters))
    return "commit" if len(only) >= quorum else "retry"


def after_failure(failures: Mapping[str, str], *, committed_by: Collection[str]) -> tuple[Verdict, str]:
    """What a worker does whose attempt was no commit, and why, once every member of its group has decided.

    One commit is enough: its bytes are in that member's log, and a second average of the round must never be made.
    """
    causes = "; ".join(f"{peer}: {reason}" for peer, reason in sorted(failures.items()))
    causes = causes or "participants differed between parts, or were too few"
    if committed_by:
        return "resync", f"{', '.join(sorted(committed_by))} committed it; here: {causes}"
    return "retry", causes
