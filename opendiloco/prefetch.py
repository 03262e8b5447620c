"""Sequences that a thread makes ready: reading and tokenization happen while the model trains.

The thread works within one shard. Where the shard ends the reader decides, in its own thread and after the last
sequence has been handed out, where to go on: leases and positions never depend on how far the thread is ahead.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opendiloco.leave import POLL_S, Leave, every
from opendiloco.ledger import Reading
from opendiloco.progress import PERIOD_S
from opendiloco.sequences import Bookmark, Sequences
from opendiloco.tokenizer import Tokens

AHEAD_TOKENS = 2**20
"""Tokens made ready before they are needed: about as many as a window of a streamed source has, so that the next
window is read and tokenized while this one is trained on."""
MIN_AHEAD = 4
"""Sequences made ready at least."""
CLOSE_LIMIT_S = 1.0
"""How long closing waits for the thread; one that is stuck in a read ends by itself afterwards."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Made:
    """What the thread made: a sequence and the place after it, the end of the shard (None), or an error."""

    sequence: Tokens | None
    after: Bookmark
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        return self.sequence is None


class Prefetched:
    """`Sequences` of another one, made ready by a thread that ends with `close`. Position and order are the same."""

    def __init__(
        self, sequences: Sequences, *, name: str, seq_len: int, leaving: Callable[[], bool] = lambda: False
    ) -> None:
        """Args: `sequences` of the source `name` belong to the thread from now on; `leaving` ends a wait for it with
        `Leave`."""
        self.shards, self._name = sequences.shards, name
        self._sequences, self._leaving = sequences, leaving
        self._ahead = max(MIN_AHEAD, AHEAD_TOKENS // seq_len)
        self._bookmark = sequences.bookmark
        self._changed = threading.Condition()
        self._made = deque[_Made]()
        self._move: Callable[[], None] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def bookmark(self) -> Bookmark:
        return self._bookmark

    def go_to(self, reading: Reading) -> None:
        before = self._bookmark
        if reading == before.reading:
            return  # what is ready goes on from there

        def move() -> None:
            if not before.reading.done:  # the thread has run ahead; at the end of a shard it has stopped
                self._sequences.return_to(before)
            self._sequences.go_to(reading)

        self._restart(move, Bookmark(reading))  # what is left over there is known with the next sequence

    def return_to(self, bookmark: Bookmark) -> None:
        self._restart(lambda: self._sequences.return_to(bookmark), bookmark)

    def next_sequence(self) -> Tokens | None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()
        say = every(PERIOD_S, lambda: logger.info("waits for text of %s, which is read and tokenized", self._name))
        with self._changed:
            while not self._made:
                if self._leaving():
                    raise Leave
                self._changed.wait(POLL_S)
                say()
            made = self._made[0]
            if made.error is not None:
                raise Leave if self._leaving() else made.error
            self._bookmark = made.after
            if not made.is_last:  # the end of a shard stays until the reader goes elsewhere
                self._made.popleft()
                self._changed.notify_all()
        return made.sequence

    def state_of(self, bookmark: Bookmark) -> dict[str, Any]:
        return self._sequences.state_of(bookmark)

    def bookmark_of(self, state: dict[str, Any]) -> Bookmark:
        return self._sequences.bookmark_of(state)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sequences.close()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)

    def _restart(self, move: Callable[[], None], bookmark: Bookmark) -> None:
        with self._changed:
            self._made.clear()
            self._move, self._bookmark = move, bookmark
            self._changed.notify_all()

    def _work(self) -> None:
        while (move := self._wait_for_work()) is not None:
            made = self._make(move)
            with self._changed:
                if self._move is None:  # else it is about a place that the reader has left
                    self._made.append(made)
                    self._changed.notify_all()
        self._sequences.close()

    def _wait_for_work(self) -> Callable[[], None] | None:
        """What to do before the next sequence; None once closed."""
        with self._changed:
            while not self._closed:
                if self._move is not None:
                    move, self._move = self._move, None
                    return move
                if not self._made or (len(self._made) < self._ahead and not self._made[-1].is_last):
                    return lambda: None
                self._changed.wait()
            return None

    def _make(self, move: Callable[[], None]) -> _Made:
        try:
            move()
            sequence = self._sequences.next_sequence()
            return _Made(sequence, self._sequences.bookmark)
        except BaseException as error:  # belongs to the reader, at this place
            return _Made(None, self._bookmark, error)
