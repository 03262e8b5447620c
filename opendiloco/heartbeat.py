"""What a peer does in the background: tasks at a steady beat, and what becomes of it when one of them dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from opendiloco.errors import SwarmError

CLOSE_LIMIT_S = 1.0

Work = Coroutine[Any, Any, None]

logger = logging.getLogger(__name__)


class Heartbeat:
    """Background tasks of one peer, from their start until they end or `close`."""

    def __init__(self, every_s: Callable[[], float]) -> None:
        """Args: `every_s` gives the seconds to the next beat."""
        self.failure: SwarmError | None = None
        """Why this peer must not go on: a task without which it is of no use has died."""
        self._every_s = every_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Work, *, is_vital: bool = True) -> asyncio.Task[None]:
        """Do something once. Where it dies the log says why, and if it is vital, the peer ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._look_at, is_vital=is_vital))
        return task

    def keep_up(
        self, work: Callable[[], Work], *, overlaps: bool = False, is_vital: bool = True, beats: int = 1
    ) -> None:
        """Do something at every beat, or once in so many.

        Args:
            overlaps: whether to begin although it is not done with the last beat's work; it must end by itself.
        """
        self.start(self._beat(work, overlaps=overlaps, is_vital=is_vital, beats=beats))

    async def close(self) -> None:
        """Stop everything."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:  # a call to a daemon that is frozen does not end even when it is cancelled
            await asyncio.wait(self._tasks, timeout=CLOSE_LIMIT_S)

    async def _beat(self, work: Callable[[], Work], *, overlaps: bool, is_vital: bool, beats: int) -> None:
        last: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(beats * self._every_s())
            if overlaps or last is None or last.done():
                last = self.start(work(), is_vital=is_vital)

    def _look_at(self, task: asyncio.Task[None], *, is_vital: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        name = task.get_coro().__qualname__  # type: ignore[union-attr]
        logger.error("%s has failed", name, exc_info=error)
        if is_vital:
            self.failure = SwarmError(f"this peer has lost touch with the swarm ({name}: {error!r}): start it again")
