"""A worker's own record and its view of the others, however the DHT is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendiloco.claims import Progress
from opendiloco.config import Contract, SwarmConfig
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.phase import PhaseReport, Watch
from opendiloco.presence import Presence
from opendiloco.rounds import Position

HERE = Position(3, "c" * 64, "d" * 64, 30)


class SlowMembership:
    """A DHT that takes every call, and comes to none of its answers."""

    def __init__(self) -> None:
        self.identity = SimpleNamespace(peer_id="a", path="key")
        self.view: dict[str, Progress] = {}
        self.known: dict[str, float] = {}
        self.own: Progress | None = None
        self.announced = asyncio.Semaphore(0)
        self.is_slow = False
        self.stretch, self.lifetime_s = 1.0, 12.0

    async def announce(self, progress: Progress) -> None:
        self.announced.release()
        await self._answer()

    async def refresh(self) -> None:
        await self._answer()

    async def publish_contract(self, contract: Contract) -> None:
        await self._answer()

    async def _answer(self) -> None:
        if self.is_slow:
            await asyncio.Event().wait()


def presence(membership: SlowMembership, reconnect: Callable[[Iterable[str]], Any] | None = None) -> Presence:
    config = SwarmConfig(heartbeat_s=0.001, expiry_s=600.0)
    contract = Contract.model_validate({"run": {"id": "run"}})

    async def nothing(known: Iterable[str]) -> None:
        return

    return Presence(cast(Any, membership), config, contract, "b" * 64, HERE, reconnect=reconnect or nothing)


def other(worker: Presence, **changes: Any) -> Progress:
    """The record of a worker that stands where this one does."""
    return worker._own.model_copy(update={"hashed_round": 3, "params_hash": "d" * 64, "started": 1.0, **changes})


def test_a_slow_dht_never_keeps_a_worker_from_announcing_itself_at_each_beat() -> None:
    async def run() -> None:
        membership = SlowMembership()
        worker = presence(membership)
        await worker.open()
        membership.is_slow = True
        for _ in range(20):  # while reads, the contract and the announcements before it hang
            await membership.announced.acquire()
        await worker.close()

    asyncio.run(run())


def test_a_worker_whose_look_at_the_others_dies_ends_and_one_that_finds_no_lost_peer_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        membership, tried = SlowMembership(), asyncio.Semaphore(0)

        async def reconnect(known: Iterable[str]) -> None:
            tried.release()
            raise ValueError("no peer id")

        worker = presence(membership, reconnect)
        await worker.open()
        for _ in range(3):
            await tried.acquire()
        assert worker.fatal is None
        membership.view = cast(Any, None)
        while worker.fatal is None:
            await membership.announced.acquire()
        assert isinstance(worker.fatal, SwarmError)
        with pytest.raises(SwarmError, match="lost touch with the swarm"):
            worker.check_agreement()
        await worker.close()

    asyncio.run(run())
    assert any("_look_for_lost_peers has failed" in message for message in caplog.messages)


def test_a_strangers_contract_stops_a_worker_only_before_its_first_commit() -> None:
    worker = presence(membership := SlowMembership())
    membership.view["stranger"] = other(worker, contract="e" * 64)
    with pytest.raises(SettingsError):
        worker.check_agreement()
    worker.participants = frozenset("ab")
    worker.check_agreement()


def test_a_worker_with_another_hash_than_most_gives_no_state_to_joiners() -> None:
    worker = presence(membership := SlowMembership())
    wrong = other(worker, params_hash="e" * 64)
    membership.view = {"wrong": wrong, "b": other(worker), "c": other(worker), "late": other(worker, hashed_round=2)}
    assert worker.announced_hash(HERE) == "d" * 64
    goal = worker.goal(Position(0, "0" * 64, "", 0))
    assert goal is not None
    assert goal.donors == ("b", "c", "late")


def test_a_worker_whose_trainer_stops_is_not_waited_for_until_it_trains_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be suspended while its network process lives on."""

    async def run() -> None:
        worker = presence(SlowMembership())
        worker.report(PhaseReport(steps=3, tokens_per_s=1.0, finish_in_s=1.0))
        await worker._announce()
        assert set(worker.outlook().candidates) == {"a"}
        monkeypatch.setattr(Watch, "has_stopped", True)
        await worker._announce()
        assert set(worker.outlook().candidates) == set()
        monkeypatch.setattr(Watch, "has_stopped", False)
        worker.report(PhaseReport(steps=4, tokens_per_s=1.0, finish_in_s=1.0))
        assert set(worker.outlook().candidates) == {"a"}

    asyncio.run(run())


def test_a_worker_whose_trainer_is_stuck_after_a_round_is_heard_of_no_more_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two workers the other one could form no group without it as long as its record is renewed."""

    async def run() -> None:
        membership = SlowMembership()
        worker = presence(membership)
        worker.arrive()
        await membership.announced.acquire()
        monkeypatch.setattr(Watch, "is_stuck", True)
        for _ in range(2):
            await worker._announce()
        assert membership.announced.locked()
        monkeypatch.setattr(Watch, "is_stuck", False)
        worker.move_to(worker.position)
        await membership.announced.acquire()

    asyncio.run(run())
    assert caplog.text.count("does not go on after a round") == 1


def test_a_worker_that_must_catch_up_first_says_so_and_not_that_it_waits_for_a_first_round() -> None:
    membership = SlowMembership()
    worker = presence(membership)
    membership.view = {"b": other(worker, round=9, hashed_round=9, lineage="e" * 64, committed_tokens=90)}
    assert worker.awaited() == "the swarm is at round 9 (eeeeee), this worker at 3 (cccccc)"
