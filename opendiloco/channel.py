"""Calls from the trainer to its own network process, over a socket pair that only the two hold."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from opendiloco.errors import SwarmError

CLOSE_LIMIT_S = 5.0


class Caller:
    """The trainer's end. Calls may overlap; a call that waits is answered by a thread that reads the replies."""

    def __init__(self, connection: Connection, *, explain_end: Callable[[], str]) -> None:
        """Args: `explain_end` says why the other process ended, once it has."""
        self._connection, self._explain_end = connection, explain_end
        self._ids = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="network replies", daemon=True)
        self._reader.start()

    def start(self, method: str, *args: Any) -> Future[Any]:
        """Begin a call; its future gets the result, or the error raised on the other side.

        Raises:
            SwarmError: the network process has ended.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                raise SwarmError(self._explain_end())
            number = next(self._ids)
            self._pending[number] = future
            try:
                self._connection.send((number, method, args))
            except OSError:
                del self._pending[number]
                raise SwarmError(self._explain_end()) from None
        return future

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call and wait for the result. Raises TimeoutError after `timeout_s` seconds."""
        return self.start(method, *args).result(timeout_s)

    def hang_up(self) -> None:
        """Ask the network process to end. Calls that still wait fail."""
        with contextlib.suppress(OSError), self._lock:
            self._connection.send(None)

    def close(self) -> None:
        """Let go of the connection, after the network process has ended."""
        self._reader.join(CLOSE_LIMIT_S)
        self._connection.close()

    def _read(self) -> None:
        while True:
            try:
                number, answer = self._connection.recv()
            except (EOFError, OSError):
                break
            with contextlib.suppress(InvalidStateError):  # the caller may have cancelled it
                _settle(self._pending.pop(number), answer)
        with self._lock:
            self._ended = True
            abandoned, self._pending = list(self._pending.values()), {}
        for future in abandoned:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(SwarmError(self._explain_end()))


def _settle(future: Future[Any], answer: bytes) -> None:
    result, error = pickle.loads(answer)
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


async def answer_calls(connection: Connection, handler: object) -> None:
    """The network process's end: run `async def` methods of `handler` as asked, until the trainer hangs up.

    Threads of their own read and write, however large a message is and however long the trainer takes for it: an event
    loop would make the descriptor non-blocking, and a message that has no room in its buffer would be cut off.
    """
    loop, calls = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    messages, answers = asyncio.Queue[Any](), SimpleQueue[tuple[int, bytes] | None]()

    def read() -> None:
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(messages.put_nowait, message)
            if message is None:
                return

    def write() -> None:
        with contextlib.suppress(OSError):  # the trainer is gone, which the other thread notices
            while (answer := answers.get()) is not None:
                connection.send(answer)

    for work in (read, write):
        threading.Thread(target=work, name=f"calls: {work.__name__}", daemon=True).start()
    while (message := await messages.get()) is not None:
        number, method, args = message
        task = loop.create_task(_answer(answers, number, handler, method, args))
        calls.add(task)
        task.add_done_callback(calls.discard)
    for task in calls:
        task.cancel()
    answers.put(None)


async def _answer(
    answers: SimpleQueue[tuple[int, bytes] | None], number: int, handler: object, method: str, args: tuple[Any, ...]
) -> None:
    try:
        answer = pickle.dumps((await getattr(handler, method)(*args), None))
    except Exception as error:  # whatever it is, the trainer's caller decides what to do about it
        answer = pickle.dumps((None, error if _can_travel(error) else SwarmError(repr(error))))
    answers.put((number, answer))


def _can_travel(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # classes say in many ways that they cannot be pickled
        return False
    return True
