"""Calls to the network process: every call ends in a result or an error, whatever happens to the other side."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import uvloop

from opendiloco.channel import Caller, answer_calls
from opendiloco.errors import SettingsError, SwarmError

PATIENCE_S = 5.0
END = "the network process has ended: see log.txt"


class TwoArguments(Exception):
    """Pickles, but cannot be made again from what it pickled."""

    def __init__(self, setting: str, cure: str) -> None:
        super().__init__(f"{setting}: {cure}")


class Handler:
    """What the network process can be asked."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting, self.cancelled = threading.Event(), threading.Event()

    async def echo(self, *values: Any) -> Any:
        return values

    async def wait(self) -> str:
        self.waiting.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "went"

    async def release(self) -> None:
        self.go.set()

    async def fail(self, error: Exception) -> None:
        raise error

    async def fail_strangely(self) -> None:
        raise TwoArguments("swarm.peers", "name another")

    async def fail_locally(self) -> None:
        class LocalError(Exception):
            """No other process knows this class."""

        raise LocalError("port 31337 is taken")

    async def give_unsendable(self) -> object:
        return threading.Lock()


class OtherSide:
    """The network process's end of the channel, in a thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(theirs.detach())
        self.handler = Handler()
        self.calls_left = -1
        self.thread = threading.Thread(target=self._run, name="other side")
        self.thread.start()
        self.caller = Caller(Connection(ours.detach()), explain_end=lambda: END)

    def _run(self) -> None:
        try:
            uvloop.run(self._answer())  # as the network process does
        finally:
            self.connection.close()

    async def _answer(self) -> None:
        await answer_calls(self.connection, self.handler)
        await asyncio.sleep(0)  # calls that were cancelled end in this turn of the loop
        self.calls_left = len(asyncio.all_tasks()) - 1


@contextmanager
def other_side() -> Iterator[OtherSide]:
    side = OtherSide()
    try:
        yield side
    finally:
        side.caller.hang_up()
        side.thread.join()
        side.caller.close()


# --- calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(), (1, "two", None), ({"a": [1.5]},), (bytes(3_000_000),)])
def test_arguments_and_results_travel_unchanged(values: tuple[object, ...]) -> None:
    with other_side() as side:
        assert side.caller.call("echo", *values, timeout_s=PATIENCE_S) == values


def test_an_error_raised_there_is_raised_here() -> None:
    with other_side() as side:
        for error in (SettingsError("swarm.peers: none"), ValueError("x"), OSError(98, "in use")):
            with pytest.raises(type(error)) as caught:
                side.caller.call("fail", error, timeout_s=PATIENCE_S)
            assert caught.value.args == error.args


def test_a_call_that_waits_does_not_hold_up_others() -> None:
    with other_side() as side:
        waiting = side.caller.start("wait")
        assert side.caller.call("echo", 1, timeout_s=PATIENCE_S) == (1,)
        assert not waiting.done()
        side.caller.call("release", timeout_s=PATIENCE_S)
        assert waiting.result(PATIENCE_S) == "went"


def test_every_thread_gets_its_own_answers() -> None:
    with other_side() as side, ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(side.caller.call, "echo", number, timeout_s=PATIENCE_S) for number in range(300)]
        assert [call.result() for call in calls] == [(number,) for number in range(300)]


def test_after_a_call_that_took_too_long_others_still_work() -> None:
    with other_side() as side:
        with pytest.raises(TimeoutError):
            side.caller.call("wait", timeout_s=0.01)
        side.caller.call("release", timeout_s=PATIENCE_S)
        assert side.caller.call("echo", 2, timeout_s=PATIENCE_S) == (2,)


def test_a_call_that_was_given_up_does_not_harm_others() -> None:
    with other_side() as side:
        given_up = side.caller.start("wait")
        given_up.cancel()
        side.caller.call("release", timeout_s=PATIENCE_S)
        assert side.caller.call("echo", 3, timeout_s=PATIENCE_S) == (3,)
        with contextlib.suppress(CancelledError):
            assert given_up.result(PATIENCE_S) == "went"


@pytest.mark.parametrize("method", ["fail_strangely", "fail_locally", "give_unsendable"])
def test_an_answer_that_cannot_travel_is_an_error_that_says_what_it_was(method: str) -> None:
    words = {"fail_strangely": "name another", "fail_locally": "port 31337 is taken", "give_unsendable": "lock"}
    with other_side() as side:
        with pytest.raises(Exception, match=words[method]) as caught:
            side.caller.call(method, timeout_s=PATIENCE_S)
        assert not isinstance(caught.value, TimeoutError)
        assert side.caller.call("echo", 4, timeout_s=PATIENCE_S) == (4,)


@pytest.mark.parametrize("call", [("no_such_method",), ("release", "one argument too many")])
def test_a_call_that_cannot_be_made_fails_alone(call: tuple[str, ...]) -> None:
    with other_side() as side:
        with pytest.raises((AttributeError, TypeError)):
            side.caller.call(*call, timeout_s=PATIENCE_S)
        assert side.caller.call("echo", 5, timeout_s=PATIENCE_S) == (5,)


# --- ends ----------------------------------------------------------------------------------------------


def test_when_the_other_side_ends_all_calls_fail_with_its_reason() -> None:
    with other_side() as side:
        waiting = [side.caller.start("wait") for _ in range(3)]
        assert side.handler.waiting.wait(PATIENCE_S)
        side.caller.hang_up()
        for call in waiting:
            with pytest.raises(SwarmError, match=END):
                call.result(PATIENCE_S)
        with pytest.raises(SwarmError, match=END):
            side.caller.call("echo", 1, timeout_s=PATIENCE_S)


def test_hanging_up_cancels_what_the_other_side_was_asked() -> None:
    with other_side() as side:
        side.caller.start("wait")
        assert side.handler.waiting.wait(PATIENCE_S)
        side.caller.hang_up()
        side.thread.join()
        assert side.handler.cancelled.is_set()
        assert side.calls_left == 0


def test_hanging_up_twice_or_on_a_side_that_is_gone_is_no_error() -> None:
    with other_side() as side:
        side.caller.hang_up()
        side.thread.join()
        side.caller.hang_up()


def test_the_other_side_ends_when_the_trainer_is_gone() -> None:
    """As after a kill -9: the socket closes and nobody hangs up."""
    ours, theirs = socket.socketpair()
    connection = Connection(theirs.detach())
    handler_ends = threading.Thread(target=lambda: asyncio.run(answer_calls(connection, object())))
    handler_ends.start()
    ours.close()
    handler_ends.join(PATIENCE_S)
    assert not handler_ends.is_alive()
    connection.close()


def test_an_answer_to_a_trainer_that_is_gone_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    connection, trainer = Connection(theirs.detach()), Connection(ours.detach())

    async def run() -> None:
        handler = Handler()
        answering = asyncio.create_task(answer_calls(connection, handler))
        trainer.send((0, "wait", ()))
        while not handler.waiting.is_set():
            await asyncio.sleep(0)
        trainer.close()
        handler.go.set()
        await asyncio.wait_for(answering, PATIENCE_S)

    asyncio.run(run())
    connection.close()
