"""How far a member may go with one reducer before the others have caught up: many streams, one link.

Left to themselves, streams that share a link get unequal parts of it. A reducer whose values come last then holds its
averages back while links stand idle, and what it can send waits behind bytes that others did not need yet. So a member
keeps its streams abreast, with an eighth of each on the way at most: eight round trips, which are soon over unless the
vector is small and the way is long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_WINDOW_BYTES = 48 * 1024
WINDOW_SHARE = 1 / 8  # of what a stream is to carry
PATIENCE_S = 0.5  # after which a stream that does not move is left behind, until it does


@dataclass
class _Stream:
    total: int
    sent: int = 0
    arrived: int = 0
    on_the_way: deque[int] = field(default_factory=deque)
    """Sizes of the parts whose arrival is not known."""
    stands_still: bool = False


class Pace:
    """Whose turn it is to send."""

    def __init__(self, totals: Mapping[int, int]) -> None:
        """Args: `totals` are the bytes that each stream is to carry."""
        self._streams = {number: _Stream(total) for number, total in totals.items() if total}
        self._changed = asyncio.Event()

    async def turn(self, number: int, size: int) -> None:
        """Wait until a stream may send `size` bytes more, which then count as sent."""
        if (stream := self._streams.get(number)) is None:
            return
        while blocking := self._behind(stream):
            self._changed.clear()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._changed.wait()
            except TimeoutError:
                for other in blocking:
                    other.stands_still = True
        stream.sent += size
        stream.on_the_way.append(size)

    def arrived(self, number: int) -> None:
        """The other end of a stream has one more part."""
        stream = self._streams.get(number)
        if stream is not None and stream.on_the_way:
            stream.arrived += stream.on_the_way.popleft()
            stream.stands_still = False
            self._changed.set()

    def leave(self, number: int) -> None:
        """A stream has come to its end: nobody waits for it."""
        self._streams.pop(number, None)
        self._changed.set()

    def is_done(self, number: int) -> bool:
        """Whether all that a stream was to carry has arrived."""
        stream = self._streams.get(number)
        return stream is not None and stream.arrived >= stream.total

    def _behind(self, stream: _Stream) -> list[_Stream]:
        """The streams that this one must not get further ahead of; it may be one of them itself."""
        reached = stream.sent / stream.total
        lead = max(WINDOW_SHARE, MIN_WINDOW_BYTES / stream.total)
        return [
            other
            for other in self._streams.values()
            if not other.stands_still and reached - other.arrived / other.total >= lead
        ]
