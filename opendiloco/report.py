"""What one attempt at a round came to, as DiLoCo tells it to whoever trains, and as a line of metrics."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass

from opendiloco.claims import ToldRound
from opendiloco.ledger import Reading
from opendiloco.metrics import CatchUpEvent, RoundEvent
from opendiloco.rounds import Position, Recovery, RoundOutcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One attempt at the end of a round, as metrics and log want it."""

    round: int
    """The round that ended, from 1."""
    outcome: RoundOutcome
    lineage: str
    params_hash: Future[str] | None = None
    """After a commit: hash of the new outer state, which a thread is computing."""
    inner_steps: int
    tokens: int
    readings: tuple[Reading, ...]
    inner_s: float
    outer_s: float = 0.0
    pseudo_gradient_norm: float
    outer_gradient_norm: float | None = None


def log_round(report: RoundReport) -> None:
    """A line in the log: at level INFO after a commit, else a warning."""
    outcome = report.outcome
    workers = "" if outcome.verdict == "resync" else f" | {len(outcome.weights)} of {outcome.live} workers"
    line = (
        f"round {report.round}{workers} | inner {report.inner_s:.1f} s, "
        f"wait {outcome.wait_s:.1f} s, all-reduce {outcome.allreduce_s:.1f} s | {outcome.verdict} {report.lineage[:6]}"
    )
    committed = outcome.verdict == "commit"
    logger.log(
        logging.INFO if committed else logging.WARNING, line + (f" | {outcome.reason}" if outcome.reason else "")
    )


def round_event(report: RoundReport, *, loss: float, codec: str) -> RoundEvent:
    """The metrics line of one attempt at a round."""
    outcome = report.outcome
    return RoundEvent(
        round=report.round,
        verdict=outcome.verdict,
        participants=sorted(outcome.weights),
        weights=dict(outcome.weights),
        lineage=report.lineage,
        params_hash=report.params_hash.result() if report.params_hash is not None else None,
        loss=loss,
        inner_steps=report.inner_steps,
        tokens=report.tokens,
        shards=[reading.shard for reading in report.readings],
        swarm_tokens=sum(outcome.tokens.values()),
        inner_s=report.inner_s,
        wait_s=outcome.wait_s,
        rendezvous_s=outcome.rendezvous_s,
        allreduce_s=outcome.allreduce_s,
        outer_s=report.outer_s,
        sent_bytes=outcome.sent_bytes,
        received_bytes=outcome.received_bytes,
        codec=codec,
        pseudo_gradient_norm=report.pseudo_gradient_norm,
        outer_gradient_norm=report.outer_gradient_norm,
    )


def told_round(report: RoundReport, *, peer: str) -> ToldRound:
    """What worker `peer` tells those who only look of a round that it has committed."""
    outcome = report.outcome
    return ToldRound(
        round=report.round,
        ended=time.time(),
        participants=len(outcome.weights),
        has_vote=peer in outcome.weights,
        inner_s=report.inner_s,
        wait_s=outcome.wait_s,
        rendezvous_s=outcome.rendezvous_s,
        allreduce_s=outcome.allreduce_s,
        outer_s=report.outer_s,
        sent_bytes=outcome.sent_bytes,
        received_bytes=outcome.received_bytes,
        share=min(1.0, outcome.share),
    )


def log_catch_up(recovery: Recovery) -> None:
    """A line in the log, at level INFO."""
    logger.info(catch_up_line(recovery))


def catch_up_line(recovery: Recovery) -> str:
    """What getting to where the swarm is has taken."""
    what = "the whole state" if recovery.full_state else f"missed rounds: {recovery.rounds_replayed}"
    return (
        f"caught up to round {recovery.position.round} in {recovery.seconds:.1f} s: {what}, "
        f"{recovery.received_bytes / 1e6:.1f} MB, donors: {len(recovery.donors)}"
    )


def catch_up_event(recovery: Recovery) -> CatchUpEvent:
    """The metrics line of a move to where the swarm is."""
    return CatchUpEvent(
        round=recovery.position.round,
        lineage=recovery.position.lineage,
        donors=recovery.donors,
        received_bytes=recovery.received_bytes,
        seconds_s=recovery.seconds,
        rounds_replayed=recovery.rounds_replayed,
        full_state=recovery.full_state,
        rounds_given_up=recovery.given_up,
    )


def given_up_line(recovery: Recovery, before: Position) -> str:
    """What a worker says that moves from `before` to a heavier lineage."""
    there, count = recovery.position, recovery.given_up
    least, earlier = ("", "") if recovery.is_given_up_exact else ("at least ", " or earlier")
    return (
        f"{least}{count} rounds of this worker are given up: the swarm went on from round {before.round - count}"
        f"{earlier} on another lineage that is heavier ({there.lineage[:6]}, {there.tokens} tokens; here "
        f"{before.lineage[:6]}, {before.tokens} tokens)"
    )
