"""A request to leave: who takes the signal, what it interrupts, and what is done until then."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from opendiloco.background import in_background
from opendiloco.leave import Leave, LeaveRequest, every


def test_request_to_leave_takes_no_signal_in_a_thread() -> None:
    """Python gives signals to the main thread only; training in another one must work."""

    def ask() -> bool:
        with LeaveRequest() as leaving:
            return leaving()

    assert in_background(ask, "trains").result(20) is False


def ask(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)
    pytest.fail("the block goes on")


def swallow() -> None:
    with contextlib.suppress(Leave):
        ask()


def wrap() -> None:
    """As imports do with the errors of what they import."""
    try:
        ask()
    except Leave as error:
        raise ImportError("could not be imported") from error


@pytest.mark.parametrize(
    "block", [ask, lambda: ask(signal.SIGINT), swallow, wrap], ids=["SIGTERM", "SIGINT", "swallowed", "wrapped"]
)
def test_a_block_that_may_be_interrupted_ends_where_it_is(block: Callable[[], None]) -> None:
    with LeaveRequest() as leaving:
        with pytest.raises(Leave), leaving.interrupted():
            block()
        with pytest.raises(Leave), leaving.interrupted():
            pytest.fail("another one begins")


def test_elsewhere_a_request_interrupts_nothing_and_an_error_is_an_error() -> None:
    with LeaveRequest() as leaving:
        with pytest.raises(RuntimeError, match="broken"), leaving.interrupted():
            raise RuntimeError("broken")
        os.kill(os.getpid(), signal.SIGTERM)
        assert leaving()


def test_reminder_comes_once_in_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], []
    monkeypatch.setattr("opendiloco.leave.time.monotonic", lambda: now[0])
    remind = every(15.0, lambda: said.append(now[0]))
    for _ in range(40):
        remind()
        now[0] += 1
    assert said == [116.0, 132.0]
