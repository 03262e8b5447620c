"""What the records of a run's workers say to one of them: where the others are, and whom its round waits for."""

from __future__ import annotations

from collections.abc import Mapping

from opendiloco.agreement import state_hashes, usual_hash
from opendiloco.claims import Progress
from opendiloco.config import Contract
from opendiloco.lobby import Candidate
from opendiloco.recovery import Goal
from opendiloco.rounds import Position, is_heavier, joining_s, joining_step


def heaviest(records: Mapping[str, Progress], than: Position) -> Goal | None:
    """The heaviest lineage in sight and who can give its state, if it is heavier than that of `than`."""
    best = max(records.values(), key=lambda record: (record.committed_tokens, record.lineage), default=None)
    if best is None or best.round == 0:
        return None
    if not is_heavier(best.committed_tokens, best.lineage, than.tokens, than.lineage):
        return None
    hashes = state_hashes(records, best)
    usual = usual_hash(hashes.values())
    donors = [
        peer
        for peer, record in records.items()
        if record.lineage == best.lineage and not record.client_mode and hashes.get(peer, usual) == usual
    ]
    return Goal(Position(best.round, best.lineage, "", best.committed_tokens), tuple(donors))


def candidate_of(record: Progress, offset: float) -> Candidate:
    """A worker as a round's leader sees it. Args: `offset` from the DHT's time to the leader's clock, seconds."""
    return Candidate(record.expected_finish + offset, can_lead=not record.client_mode)


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
