"""A member's streams to the reducers stay abreast, and none waits long for one that does not move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from opendiloco import pace
from opendiloco.pace import MIN_WINDOW_BYTES, Pace

PART = MIN_WINDOW_BYTES
TOTAL = 16 * PART  # so that two parts may be on the way


async def may_send(turn: Awaitable[None]) -> bool:
    """Whether it is this stream's turn now; a turn that is not taken is given back."""
    task = asyncio.ensure_future(turn)
    for _ in range(3):
        await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        return False
    return True


async def sent(streams: Pace, number: int) -> int:
    """How many more parts a stream may send now."""
    count = 0
    while await may_send(streams.turn(number, PART)):
        count += 1
    return count


def test_a_stream_is_never_further_ahead_of_any_other_than_an_eighth_of_its_way() -> None:
    async def check() -> None:
        streams = Pace({1: TOTAL, 2: TOTAL, 3: TOTAL // 2})
        assert [await sent(streams, number) for number in (1, 2, 3)] == [2, 2, 1]
        streams.arrived(1)
        assert await sent(streams, 1) == 0  # the others have nothing yet
        streams.arrived(2)
        assert await sent(streams, 1) == 0
        streams.arrived(3)  # half as much to carry: as far with one part as the others with two
        assert [await sent(streams, number) for number in (1, 2, 3)] == [1, 1, 1]

    asyncio.run(check())


def test_a_stream_waits_for_no_other_that_has_ended_or_carries_nothing() -> None:
    async def check() -> None:
        streams = Pace({1: TOTAL, 2: TOTAL, 3: 0})
        assert await sent(streams, 1) == 2
        streams.arrived(1)
        streams.leave(2)
        assert await sent(streams, 1) == 1
        await streams.turn(2, PART)  # whoever still sends there is not held up

    asyncio.run(check())


def test_a_stream_that_stands_still_is_left_behind_until_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PATIENCE_S", 0.01)

    async def check() -> None:
        streams = Pace({1: TOTAL, 2: TOTAL})
        await streams.turn(2, PART)
        for _ in range(6):
            await streams.turn(1, PART)
            streams.arrived(1)
        streams.arrived(2)
        assert await sent(streams, 1) == 0

    asyncio.run(check())


def test_all_has_arrived_once_every_part_has() -> None:
    async def check() -> None:
        streams = Pace({1: 2 * PART})
        for _ in range(2):
            assert not streams.is_done(1)
            await streams.turn(1, PART)
            streams.arrived(1)
        assert streams.is_done(1)
        streams.arrived(1)  # one more than was sent: nobody's
        assert streams.is_done(1)

    asyncio.run(check())
