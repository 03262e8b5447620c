"""What one attempt at a round came to, as DiLoCo tells it to whoever trains, and as a line of metrics."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from opendiloco.metrics import RoundEvent
from opendiloco.rounds import RoundOutcome


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One attempt at the end of a round, as metrics and log want it."""

    round: int
    """The round that ended, from 1."""
    outcome: RoundOutcome
    lineage: str
    params_hash: Future[str] | None
    """After a commit: hash of the new outer state, which a thread is computing."""
    inner_steps: int
    tokens: int
    inner_s: float
    outer_s: float
    pseudo_gradient_norm: float
    outer_gradient_norm: float | None


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
