"""One call in a thread of its own, which ends with it: nobody has to stop anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(compute: Callable[[], T], name: str, *, daemon: bool = False) -> Future[T]:
    """Begin to compute; `name` is the thread's. The end of the process waits for it, unless it is a daemon."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            result = compute()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name=name, daemon=daemon).start()
    return future
