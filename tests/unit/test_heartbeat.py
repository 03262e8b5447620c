"""Background tasks: on their beat whatever the others do, and none dies without a word."""

from __future__ import annotations

import asyncio

import pytest

from opendiloco.heartbeat import Heartbeat

BEAT_S = 0.001


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("overlaps", "at_once"), [(True, 5), (False, 1)])
def test_work_that_overlaps_begins_at_each_beat_and_other_work_once_at_a_time(overlaps: bool, at_once: int) -> None:
    async def run() -> None:
        heart, begun, quick = Heartbeat(lambda: BEAT_S), 0, asyncio.Semaphore(0)

        async def slow() -> None:
            nonlocal begun
            begun += 1
            await forever()

        async def count() -> None:
            quick.release()

        heart.keep_up(slow, overlaps=overlaps)
        heart.keep_up(count)
        for _ in range(6):
            await quick.acquire()
        assert begun >= at_once if overlaps else begun == 1
        await heart.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_vital", [True, False])
def test_work_that_dies_is_logged_and_goes_on_and_ends_the_peer_if_it_is_vital(
    is_vital: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> Heartbeat:
        heart, again, calls = Heartbeat(lambda: BEAT_S), asyncio.Event(), 0

        async def fail() -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                again.set()
            raise ValueError("no such peer")

        heart.keep_up(fail, is_vital=is_vital)
        await again.wait()
        await heart.close()
        return heart

    failure = asyncio.run(run()).failure
    assert any("fail has failed" in message for message in caplog.messages)
    assert (failure is not None) == is_vital
    assert failure is None or ("no such peer" in str(failure) and failure.exit_code == 75)


def test_nothing_goes_on_after_the_end() -> None:
    async def run() -> None:
        heart = Heartbeat(lambda: BEAT_S)
        tasks = [heart.start(forever()) for _ in range(2)]
        await heart.close()
        assert all(task.cancelled() for task in tasks)
        assert heart.failure is None

    asyncio.run(run())
