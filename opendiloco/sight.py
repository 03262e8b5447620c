"""What the records of a run's workers say to one of them: where the others are, and whom its round waits for."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from opendiloco.agreement import state_hashes, usual_hash
from opendiloco.claims import FOLLOW, Progress
from opendiloco.config import Contract
from opendiloco.doubts import is_at
from opendiloco.lobby import Candidate
from opendiloco.rounds import Goal, Position, is_heavier, joining_s, joining_step

RENEW_S = 0.5  # for a record to be renewed and read


def is_alike(record: Progress, own: Progress) -> bool:
    """Whether its worker trains the same."""
    return record.contract == own.contract and record.layout == own.layout


def heaviest(records: Mapping[str, Progress], than: Position) -> Goal | None:
    """The heaviest lineage in sight and who can give its state, if it is heavier than that of `than`."""
    best = max(records.values(), key=lambda record: (record.committed_tokens, record.lineage), default=None)
    if best is None or best.round == 0:
        return None
    if not is_heavier(best.committed_tokens, best.lineage, than.tokens, than.lineage):
        return None
    place = Position(best.round, best.lineage, "", best.committed_tokens)
    hashes = state_hashes(records, best)
    usual = usual_hash(hashes.values())
    donors = [
        peer
        for peer, record in records.items()
        if is_at(record, place) and not record.client_mode and hashes.get(peer, usual) == usual
    ]
    return Goal(place, tuple(donors))


def in_sight(
    records: Mapping[str, Progress], own: Progress, participants: Collection[str], offset: float
) -> tuple[dict[str, Candidate], dict[str, float]]:
    """Who brings values to a worker's round, and who comes late to follow it, and when.

    Args:
        records: of all that train the same, this worker included.
        participants: who got the last round, whatever their records still say.
        offset: from the DHT's time to this process's clock, seconds.
    """
    candidates, late, now = dict[str, Candidate](), dict[str, float](), time.time() + offset
    for peer, record in records.items():
        finish, is_there = record.expected_finish + offset, (record.round, record.lineage) == (own.round, own.lineage)
        if record.state == "late" and record is not own and record.round <= own.round:
            # one that has missed the last round, too, is about to say anew when it will be there
            late[peer] = finish if record.round == own.round else max(finish, now + RENEW_S)
        elif (is_there and record.state not in FOLLOW) or (record.round < own.round and peer in participants):
            candidates[peer] = Candidate(finish, can_lead=not record.client_mode)
    return candidates, late


def phase_of_others(
    records: Mapping[str, Progress], own: Progress, contract: Contract, *, now: float
) -> tuple[int, float]:
    """Where in the inner phase of this worker's round the others are: see `rounds.joining_step` and `joining_s`."""
    steps = contract.inner.steps
    at_work = [r for r in records.values() if r.lineage == own.lineage and r.state in ("training", "averaging")]
    if not own.client_mode and all(record.client_mode for record in at_work):
        return 0, 0.0  # none of them can lead a group: their round waits for a whole phase of this worker
    done = [steps if record.state == "averaging" else record.steps for record in at_work]
    left = [record.expected_finish - now for record in at_work if record.state == "averaging" or record.steps > 0]
    return joining_step(done, steps), joining_s(left, contract.rounds.deadline)


def start_line(ahead: str | None, reached: int, present: int, wanted: int) -> str:
    """What the first round waits for, in words; empty where it may start. Args: see `Presence.ahead`, `lost_round`."""
    if ahead:
        return ahead
    if reached:
        return f"none of the workers that had reached round {reached} is there any more"
    if present < wanted:
        return f"{present} of {wanted} workers are there (rounds.start_peers), still to come: {wanted - present}"
    return ""


def missing_line(
    candidates: Mapping[str, Candidate], records: Mapping[str, Progress], lineage: str, *, now: float
) -> str:
    """Whom a round waits for, in words."""
    if not any(candidate.can_lead for candidate in candidates.values()):
        return f"none of the {len(candidates)} workers can be reached (swarm.client_mode), and one must lead the round"
    missing = [
        f"{peer} ({record.steps} inner steps done, expected in {max(0.0, record.expected_finish - now):.0f} s)"
        for peer, record in sorted(records.items())
        if peer in candidates and (record.state, record.lineage) != ("averaging", lineage)
    ]
    there = f"{len(candidates) - len(missing)} of {len(candidates)} workers are there"
    return f"{there}, missing: {', '.join(missing)}" if missing else there
