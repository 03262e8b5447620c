"""Leaving in order: how a user asks for it, and how that request unwinds a worker."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self, TypeVar

from opendiloco.background import in_background
from opendiloco.errors import SwarmError

POLL_S = 0.2  # how soon a wait notices a request to leave

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Leave(Exception):
    """The user asked this worker to leave; raised where the worker waits or is between two steps."""


def wait_for(future: Future[T], leaving: Callable[[], bool], *, meanwhile: Callable[[], None] = lambda: None) -> T:
    """The result of `future`, or `Leave` once `leaving` says so; `meanwhile` is called a few times a second."""
    while True:
        try:
            return future.result(POLL_S)
        except NotDone:
            if future.done():
                return future.result()
            if leaving():
                raise Leave from None
        meanwhile()


def every(seconds: float, act: Callable[[], None]) -> Callable[[], None]:
    """A function to be called often, which calls `act` once in so many seconds from now on."""
    due = time.monotonic() + seconds

    def act_when_due() -> None:
        nonlocal due
        if time.monotonic() > due:
            act()
            due = time.monotonic() + seconds

    return act_when_due


def run(function: Callable[[], T], leaving: Callable[[], bool], *, name: str) -> T:
    """What `function` returns or raises, from a thread of that name; or `Leave` once `leaving` says so.

    The thread is then left to itself: it must notice by itself that nobody waits for it.
    """
    future = in_background(function, name, daemon=True)
    try:
        return wait_for(future, leaving)
    except BaseException:
        if leaving():
            raise Leave from None
        raise


@contextmanager
def ends_in_order(leaving: Callable[[], bool]) -> Iterator[None]:
    """A block that a request to leave ends, also where it shows as the end of the network.

    Whoever stops a service may signal all of its processes, the network process among them.
    """
    try:
        yield
    except Leave:
        return
    except SwarmError as error:
        if not leaving():
            raise
        logger.warning("this peer has left, and not in order: %s", error)


@contextmanager
def ends_at_second(numbers: Collection[int]) -> Iterator[None]:
    """A second one of these signals ends the process although the main thread is in a call that takes long.

    No handler runs until such a call is over, be it a step of a large model. Signals must have handlers, and another
    wakeup descriptor, such as an event loop's in this thread, is left alone.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)

    def count() -> None:
        came: list[int] = []
        while read := os.read(ours, 64):
            came += [number for number in read if number in numbers]
            if len(came) > 1:
                os._exit(128 + came[-1])

    watching = threading.Thread(target=count, name="second signal", daemon=True)
    watching.start()
    try:
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        os.close(theirs)
        watching.join()
        os.close(ours)


def hang_up() -> tuple[signal.Signals, ...]:
    """SIGHUP, which the end of a terminal sends, unless whoever started this process had it ignored (nohup)."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


class LeaveRequest:
    """SIGINT, SIGTERM or SIGHUP asks to leave in order: calling this says whether one came.

    A second SIGINT or SIGTERM ends at once; of a terminal's end a process may hear more than once. Python gives signals
    to the main thread only: in another one, no signal is taken.
    """

    def __init__(self) -> None:
        self._asked = False
        self._stack = contextlib.ExitStack()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        mine = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        for number in mine:
            self._before[number] = signal.signal(number, self._ask)
        if mine:
            for number in hang_up():
                self._stack.callback(signal.signal, number, signal.signal(number, self._ask))
            self._stack.enter_context(ends_at_second(mine))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._asked:
            return
        self._asked = True
        for again in self._before:
            signal.signal(again, signal.SIG_DFL)
        name = signal.Signals(number if number in self._before else signal.SIGTERM).name
        logger.info("leaving in order (%s again: at once)", name)
