"""The newest snapshot and the history as browsers get them: JSON, in pieces that are soon made and soon sent."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping

from opendiloco.monitor.archive import Archive
from opendiloco.monitor.sights import Sight
from opendiloco.monitor.snapshot import Snapshot

PIECE_EVENTS = 500


class Board:
    """For any number of browsers. Methods may be called from any thread."""

    def __init__(self, archive: Archive) -> None:
        self._archive, self._lock = archive, threading.Lock()
        self.is_closed = False
        self._snapshot = "null"
        self._changed: set[Callable[[], None]] = set()

    def take(self, workers: Mapping[str, Sight], snapshot: Snapshot) -> None:
        """What a look has found."""
        self._archive.take(workers, snapshot)
        self._snapshot = json.dumps(snapshot.to_json())
        self._tell()

    def close(self) -> None:
        """Nothing more comes: whoever follows is let go."""
        self.is_closed = True
        self._tell()

    def news(self, since: int) -> Iterator[tuple[int, bytes]]:
        """The events after number `since` in pieces, each with the number to go on after; the snapshot is in the last.

        In a piece `life` says whose numbers these are, and `count` is the number.
        """
        history, snapshot = self._archive.history, self._snapshot
        events, newest = history.after(since)
        for first in range(0, len(events) or 1, PIECE_EVENTS):
            piece, is_last = events[first : first + PIECE_EVENTS], first + PIECE_EVENTS >= len(events)
            count = newest if is_last else piece[-1][0]
            lines = ", ".join(line for _, line in piece)
            yield (
                count,
                f'{{"life": "{history.life}", "count": {count}, "snapshot": {snapshot if is_last else "null"}, '
                f'"events": [{lines}]}}'.encode(),
            )

    @contextlib.contextmanager
    def following(self, call: Callable[[], None]) -> Iterator[None]:
        """In the block `call` is called after each new snapshot."""
        with self._lock:
            self._changed.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._changed.discard(call)

    def _tell(self) -> None:
        with self._lock:
            for call in self._changed:
                call()
