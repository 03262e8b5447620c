"""A worker whose attempt failed asks the others whether the round was committed after all."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from opendiloco import participation
from opendiloco.allreduce import Group
from opendiloco.participation import Participation
from opendiloco.rounds import Position
from opendiloco.wire import WireError

POSITION = Position(3, "lineage", "hash", 0)


LOST = WireError("connection lost")


class Asked:
    """Stands for other workers: what each answers, call by call; the last answer stays."""

    def __init__(self, **answers: list[bool | WireError | None]) -> None:
        self.answers, self.calls = answers, dict.fromkeys(answers, 0)
        self.dead_after = dict.fromkeys(answers, math.inf)
        """Calls after which a peer no longer renews its record."""

    def is_heard_of(self, peer: str) -> bool:
        return self.calls[peer] < self.dead_after[peer]

    async def has_round(self, peer: str, round: int, before: str) -> bool | None:
        assert (round, before) == (4, "lineage")
        said = self.answers[peer][min(self.calls[peer], len(self.answers[peer]) - 1)]
        self.calls[peer] += 1
        if isinstance(said, WireError):
            raise said
        return said


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 100, "it asks for ever"


def committed_by(asked: Asked, monkeypatch: pytest.MonkeyPatch, *, limit_s: float = 5.0) -> tuple[list[str], Clock]:
    """Who has committed the round, as a worker finds out that was with them in a group; and the clock then."""
    clock, peers = Clock(), sorted(asked.answers)
    monkeypatch.setattr(participation, "time", clock)
    monkeypatch.setattr(participation, "asyncio", SimpleNamespace(gather=asyncio.gather, sleep=clock.sleep))
    monkeypatch.setattr(participation, "time_limit_s", lambda _: limit_s)
    presence = SimpleNamespace(position=POSITION, peer="me", is_heard_of=asked.is_heard_of)
    nobody, values = cast(Any, None), torch.zeros(1)
    worker = Participation(
        cast(Any, presence), nobody, nobody, nobody, cast(Any, asked), values=values, average=values, reduces=True
    )
    group = cast(Group, SimpleNamespace(peers=["me", *peers], members=["me", *peers]))
    return asyncio.run(worker._committed_by(group)), clock


def test_member_that_never_decides_is_asked_only_as_long_as_an_attempt_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(done=[True], undecided=[None])
    found, clock = committed_by(asked, monkeypatch)
    assert found == ["done"]
    assert clock.now == pytest.approx(5.0, abs=2 * participation.DECISION_POLL_S)
    assert asked.calls["done"] == 1
    assert asked.calls["undecided"] == pytest.approx(5.0 / participation.DECISION_POLL_S, abs=2)


def test_member_that_is_undecided_at_first_is_asked_until_it_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(no=[None, False], yes=[None, None, True])
    found, _ = committed_by(asked, monkeypatch)
    assert found == ["yes"]
    assert asked.calls == {"no": 2, "yes": 3}


def test_member_that_cannot_be_asked_is_asked_again_if_it_seems_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(back=[LOST, LOST, None, True], dead=[LOST], cut_off=[LOST])
    asked.dead_after["cut_off"] = 1
    found, clock = committed_by(asked, monkeypatch)
    assert found == ["back"]
    assert asked.calls == {"back": 4, "dead": participation.MAX_LOST, "cut_off": 1}
    assert clock.now < 1.0  # the survivors of a dead member do not wait for its record to expire
