"""Waiting for something to come true, for as long as a busy machine may need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import pytest

T = TypeVar("T")

LIMIT_S = 90.0
"""Bound of every wait whose length is not the claim; the machine may be busy."""
POLL_S = 0.02


class WaitUntil(Protocol):
    def __call__(self, condition: Callable[[], T], what: str, *, limit_s: float = LIMIT_S) -> T: ...


def _wait_until(condition: Callable[[], T], what: str, *, limit_s: float = LIMIT_S) -> T:
    """The first true value of `condition`; fails with `what` when none comes within `limit_s` seconds."""
    give_up = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > give_up:
            pytest.fail(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)
    return value


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    return _wait_until
