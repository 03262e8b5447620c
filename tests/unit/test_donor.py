"""What a donor is asked: whether a round was committed is answered whatever else it gives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from opendiloco import donor as donors
from opendiloco.codec import get_codec
from opendiloco.donor import Ask, Donor
from opendiloco.fetcher import Fetcher
from opendiloco.roundlog import LogEntry
from opendiloco.rounds import Position
from opendiloco.wire import FrameKind, Stream, WireError

SIZE, BEFORE, AFTER, OTHER = 8, "b" * 64, "a" * 64, "0" * 64


class Loopback:
    """A donor of round 4 and a fetcher that asks it, over socket pairs."""

    def __init__(self, folder: Path) -> None:
        vectors = {name: torch.zeros(SIZE) for name in donors.STATE_VECTORS}
        self.donor = Donor(cast(Any, None), vectors, folder, keep=2, silence_s=20.0)
        self.donor.settle(Position(4, AFTER, ""))
        self.fetcher = Fetcher(self.connect, get_codec("none"), torch.zeros(SIZE), [torch.zeros(SIZE)] * 3)
        self._serving: list[asyncio.Task[None]] = []

    async def connect(self, peer: str) -> Stream:
        near, far = socket.socketpair()
        here, there = await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)
        self._serving.append(
            asyncio.create_task(self.donor._serve(cast(Any, SimpleNamespace(peer_id="asker")), *there))
        )
        return Stream(*here, timeout_s=20.0)

    def commit(self) -> None:
        entry = LogEntry(
            round=4,
            before=BEFORE,
            lineage=AFTER,
            weights={"x": 1.0},
            tokens={"x": 1},
            readings={},
            digest=AFTER,
            parts=[SIZE],
        )
        self.donor.remember(entry, [memoryview(bytes(4 * SIZE))])

    async def close(self) -> None:
        await asyncio.gather(*self._serving)
        await self.donor.close()


def with_loopback(folder: Path, work: Callable[[Loopback], Awaitable[None]]) -> None:
    async def run() -> None:
        loopback = Loopback(folder)
        async with asyncio.timeout(20):
            await work(loopback)
            await loopback.close()

    asyncio.run(run())


def test_whether_a_round_was_committed_is_answered_when_all_streams_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donors, "MAX_STREAMS", 2)

    async def work(loopback: Loopback) -> None:
        loopback.commit()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):  # joiners in the middle of their fetch
                stream = await loopback.connect("donor")
                stack.callback(stream.close)
                await stream.send(FrameKind.REQUEST, Ask(what="chunk", stop=1).model_dump_json().encode())
                await stream.receive_text(FrameKind.HEADER, max_bytes=1000)
            assert await loopback.fetcher.has_round("donor", 4, BEFORE) is True
            assert await loopback.fetcher.round(4, BEFORE, ["donor"]) is None  # that would move data
            assert await loopback.fetcher.has_round("donor", 5, AFTER) is False
            with loopback.donor.in_all_reduce(5):
                assert await loopback.fetcher.has_round("donor", 5, AFTER) is None

    with_loopback(tmp_path, work)


def test_only_a_clear_no_counts_as_no(tmp_path: Path) -> None:
    async def work(loopback: Loopback) -> None:
        class Busy(Stream):
            async def receive_text(self, kind: FrameKind, *, max_bytes: int, patience_s: float = 0.0) -> bytes:
                raise WireError(said)

        async def connect(peer: str) -> Stream:
            stream = await loopback.connect(peer)
            stream.__class__ = Busy
            return stream

        asking = Fetcher(connect, get_codec("none"), torch.zeros(SIZE), [])
        said = "refused: busy: ask another peer"
        assert await asking.has_round("donor", 4, BEFORE) is None
        for said in ("connection lost", "sent nothing for 5 s", "sent a frame of kind 9 with 3 bytes out of turn"):
            with pytest.raises(WireError, match=said):
                await asking.has_round("donor", 4, BEFORE)

    with_loopback(tmp_path, work)


def test_a_round_is_elsewhere_only_where_the_donors_own_lineage_has_one_of_that_number(tmp_path: Path) -> None:
    async def work(loopback: Loopback) -> None:
        loopback.commit()
        await loopback.donor.close()  # now it is on disk
        fate_of = loopback.fetcher.fate_of
        assert await fate_of("donor", 4, BEFORE) == "committed"
        assert await fate_of("donor", 4, OTHER) == "elsewhere"
        assert await fate_of("donor", 3, OTHER) == "unknown"
        loopback.donor.settle(Position(9, "9" * 64, ""))  # it has moved to another lineage: its log is of no use
        assert await fate_of("donor", 4, OTHER) == "unknown"

    with_loopback(tmp_path, work)
