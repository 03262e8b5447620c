"""Records of workers as a monitor finds them."""

from __future__ import annotations

from typing import Any

from opendiloco.claims import Progress, Seen, Told, ToldRound
from opendiloco.config import Contract, RunConfig

NOW = 1_800_000_000.0
CONTRACT = Contract(run=RunConfig(id="test", rounds=9))
STEPS = CONTRACT.inner.steps


def progress(**changes: Any) -> Progress:
    usual: dict[str, Any] = {
        "session": "0" * 16,
        "started": NOW - 100,
        "issued": NOW - 1,
        "contract": CONTRACT.digest,
        "layout": "2" * 64,
        "round": 3,
        "lineage": "3" * 64,
        "params_hash": "4" * 64,
        "hashed_round": 3,
        "committed_tokens": 3000,
        "state": "training",
        "steps": STEPS // 2,
        "tokens_per_s": 100.0,
        "expected_finish": NOW + 30,
        "client_mode": False,
        "shards": [],
    }
    return Progress.model_validate(usual | changes)


def told_round(round: int = 3, **changes: Any) -> ToldRound:
    usual: dict[str, Any] = {
        "round": round,
        "ended": NOW - 50 + round,
        "participants": 2,
        "has_vote": True,
        "inner_s": 20.0,
        "wait_s": 1.0,
        "rendezvous_s": 0.1,
        "allreduce_s": 0.5,
        "outer_s": 0.01,
        "sent_bytes": 10,
        "received_bytes": 20,
        "share": 0.5,
    }
    return ToldRound.model_validate(usual | changes)


def told(*rounds: ToldRound, version: str = "0.1.0", **changes: Any) -> Told:
    return Told(session="0" * 16, version=version, rounds=list(rounds), **changes)


def seen(record: Progress | None = None, tells: Told | None = None, *, until: float = NOW + 11) -> Seen:
    return Seen(record or progress(), until, tells)
