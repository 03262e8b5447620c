"""Leaving in order: how a user asks for it, and how that request unwinds a worker."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from types import FrameType, TracebackType
from typing import Self, TypeVar

POLL_S = 0.2  # how soon a wait notices a request to leave

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Leave(Exception):
    """The user asked this worker to leave; raised where the worker waits or is between two steps."""


def wait_for(
    future: Future[T],
    leaving: Callable[[], bool],
    *,
    meanwhile: Callable[[], None] = lambda: None,
    every_s: float = math.inf,
) -> T:
    """The result of `future`, or `Leave` once `leaving` says so; `meanwhile` is called every so many seconds."""
    patience = time.monotonic() + every_s
    while True:
        try:
            return future.result(POLL_S)
        except NotDone:
            if leaving():
                raise Leave from None
        if time.monotonic() > patience:
            meanwhile()
            patience = time.monotonic() + every_s


class LeaveRequest:
    """SIGINT or SIGTERM asks to leave in order: calling this says whether one came. A second one ends at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        for again in self._before:
            signal.signal(again, signal.SIG_DFL)
        logger.info("leaving in order (%s again: at once)", signal.Signals(number).name)
