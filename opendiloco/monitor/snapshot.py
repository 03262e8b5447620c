"""One moment of a run as others see it: its round, its workers, what is not as it should be. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opendiloco.claims import Progress
from opendiloco.config import Contract
from opendiloco.monitor.sights import Sight, followed, head_of, with_contract
from opendiloco.monitor.troubles import Trouble, troubles


@dataclass(frozen=True)
class WorkerRow:
    """One worker."""

    peer: str
    state: str
    """training, averaging, following, left, or silent: its record has expired."""
    round: int
    """Committed."""
    lineage: str
    steps: int
    progress: float
    """Share of its inner phase that is done, 0 to 1."""
    tokens_per_s: float
    bandwidth_mbit: float | None
    """It can send, as it measured; None while it is not known."""
    version: str
    last_seen_s: float
    """Since its newest record was found."""
    expected_finish: float
    """Of its inner phase, Unix seconds."""
    client_mode: bool
    started: float
    """Its process, Unix seconds."""
    loss: float | None
    """Mean over the last inner phase that it told of."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    time: float
    run: dict[str, Any]
    """id, digest of the contract, rounds, inner_steps, model, codec."""
    round: int
    """Committed: see `sights.head_of`. Where nobody is there, as far as those had come who were."""
    lineage: str
    committed_tokens: int
    workers: int
    """That are there."""
    tokens_per_s: float
    """Of all of them."""
    expected_end: float | None
    """Of the inner phase for the last of those who train, Unix seconds; None where nobody does."""
    validation: dict[str, Any] | None
    """round, loss, tokens: the newest evaluation that anybody told of."""
    peers: tuple[WorkerRow, ...]
    warnings: tuple[Trouble, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def snapshot(contracts: Sequence[Contract], sights: Mapping[str, Sight], now: float) -> Snapshot:
    """What `sights` come to: the run under the contract of most. Of others only a warning tells.

    Args:
        contracts: those that the DHT has for the run, at least one.
    """
    contract = followed(contracts, sights, now)
    ours = with_contract(sights, contract.digest)
    there = {peer: sight for peer, sight in ours.items() if not sight.is_gone(now)}
    head = head_of(there or ours)
    training = [sight.progress.expected_finish for sight in there.values() if sight.progress.state == "training"]
    return Snapshot(
        time=now,
        run={
            "id": contract.run.id,
            "contract": contract.digest,
            "rounds": contract.run.rounds,
            "inner_steps": contract.inner.steps,
            "model": contract.model.name,
            "codec": contract.outer.codec,
        },
        round=head.round if head else 0,
        lineage=head.lineage if head else "",
        committed_tokens=head.committed_tokens if head else 0,
        workers=len(there),
        tokens_per_s=sum(_speed(sight.progress) for sight in there.values()),
        expected_end=max(training, default=None),
        validation=_validation(ours, head),
        peers=tuple(_row(peer, sight, contract, now) for peer, sight in sorted(ours.items())),
        warnings=tuple(troubles(contracts, sights, now)),
    )


def _speed(record: Progress) -> float:
    return record.tokens_per_s if record.state in ("training", "averaging") else 0.0


def _validation(sights: Mapping[str, Sight], head: Progress | None) -> dict[str, Any] | None:
    """Of the newest round that has one, up to the head's, what stands on most tokens; the median of those."""
    told = [one for sight in sights.values() if sight.told for one in sight.told.evaluations]
    told = [one for one in told if head is None or one.round <= head.round]
    if not told:
        return None
    newest = max((one.round, one.tokens) for one in told)
    losses = [one.loss for one in told if (one.round, one.tokens) == newest]
    return {"round": newest[0], "loss": statistics.median(losses), "tokens": newest[1]}


def _row(peer: str, sight: Sight, contract: Contract, now: float) -> WorkerRow:
    record, told = sight.progress, sight.told
    done = 1.0 if record.state == "averaging" else min(1.0, record.steps / contract.inner.steps)
    losses = [one.loss for one in told.rounds if one.loss is not None] if told else []
    return WorkerRow(
        peer=peer,
        state="silent" if sight.is_silent(now) else record.state,
        round=record.round,
        lineage=record.lineage,
        steps=record.steps,
        progress=done,
        tokens_per_s=0.0 if sight.is_gone(now) else _speed(record),
        bandwidth_mbit=told.bandwidth * 8 / 1e6 if told and told.bandwidth else None,
        version=told.version if told else "",
        last_seen_s=max(0.0, now - sight.last_seen),
        expected_finish=record.expected_finish,
        client_mode=record.client_mode,
        started=record.started,
        loss=losses[-1] if losses else None,
    )
