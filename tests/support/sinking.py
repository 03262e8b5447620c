"""Events to write, sinks that keep them, and sinks that do not come back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from opendiloco.metrics import (
    InnerStepEvent,
    JoinEvent,
    RoundEvent,
)
from opendiloco.scalars import Point
from opendiloco.settings import Settings, load_settings
from support import waiting

if TYPE_CHECKING:
    from support.waiting import WaitUntil

PEER = "12D3KooWabcdefgh"
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"
wait_until = waiting.wait_until  # the fixture
LONG_S = 60.0  # to finish in, where that is not the claim


def step(number: int, loss: float = 2.0) -> InnerStepEvent:
    return InnerStepEvent(
        round=number // 50,
        inner_step=number % 50 + 1,
        global_inner_step=number,
        loss=loss,
        lr=1e-3,
        grad_norm=0.5,
        tokens_seen=100,
        tokens_per_s=10.0,
    )


def round_event(verdict: str = "commit", outer_gradient_norm: float | None = 0.25) -> RoundEvent:
    return RoundEvent(
        round=2,
        verdict=verdict,  # type: ignore[arg-type]
        participants=["a", "b"],
        weights={"a": 1.0, "b": 1.0},
        lineage="l",
        params_hash="h",
        loss=3.0,
        inner_steps=50,
        tokens=400,
        shards=[1, 2],
        swarm_tokens=800,
        inner_s=1.0,
        wait_s=0.5,
        rendezvous_s=0.25,
        allreduce_s=0.125,
        outer_s=0.0625,
        sent_bytes=10,
        received_bytes=20,
        codec="int8",
        pseudo_gradient_norm=0.75,
        outer_gradient_norm=outer_gradient_norm,
    )


JOIN = JoinEvent(
    round=2, lineage="", source="swarm", donors=["x"], received_bytes=7, seconds_s=1.5, params_hash="h"
)  # fmt: skip


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.calls: list[str] = []

    def open(self) -> str:
        self.calls.append("open")
        return "in memory"

    def write(self, point: Point) -> None:
        self.points.append(point)

    def close(self) -> None:
        self.calls.append("close")


class Hanging(Recorder):
    """A sink that does not come back from one of its calls until it is released."""

    def __init__(self, where: str, release: threading.Event) -> None:
        super().__init__()
        self.where, self.hangs, self._release = where, threading.Event(), release

    def _call(self, what: str) -> None:
        if what == self.where:
            self.hangs.set()
            assert self._release.wait(120)

    def open(self) -> str:
        self._call("start")
        return super().open()

    def write(self, point: Point) -> None:
        self._call("write")
        super().write(point)

    def close(self) -> None:
        self._call("close")
        super().close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def release(wait_until: WaitUntil) -> Iterator[threading.Event]:
    """Lets hanging sinks go, at the end at the latest; then every thread of a sink ends."""
    before, event = set(threading.enumerate()), threading.Event()
    yield event
    event.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads of sinks end")


def settings_with(*names: str, sets: tuple[str, ...] = ()) -> Settings:
    chosen = ", ".join(f'"{name}"' for name in names)
    return load_settings(None, None, [f"log.sinks=[{chosen}]", *sets])
