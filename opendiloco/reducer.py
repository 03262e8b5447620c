"""One member's slice of an all-reduce: take others' values, average them, hand everybody the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opendiloco.codec import Codec, CodecError, accumulate
from opendiloco.rounds import Part
from opendiloco.wire import FrameKind, Stream, WireError

MAX_KEEPALIVE_S = 1.0

Accept = Callable[[Part, memoryview, bytes], None]


@dataclass
class _Reduction:
    """One part of the slice."""

    part: Part
    waiting: set[int]
    """Members whose values are still to come."""
    contributors: set[int] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    payload: tuple[memoryview, bytes] | None = None
    """Encoded average and mask of contributors, once done; None when the average is not finite."""


class Reducer:
    """Averages one slice in fp32 with the weights of those who really sent, and encodes each part once."""

    def __init__(
        self,
        parts: Sequence[Part],
        weights: Sequence[float],
        me: int,
        *,
        codec: Codec,
        accept: Accept,
        silence_s: float,
    ) -> None:
        """Prepare to reduce `parts`.

        Args:
            weights: of all members, by index; those of weight 0 send no values and only take the averages.
            me: this member's index.
            accept: takes each finished part.
            silence_s: after which a member that has not opened its stream counts as dropped.
        """
        self._silence_s, self._keepalive_s = silence_s, min(MAX_KEEPALIVE_S, silence_s / 4)
        self._weights, self._me, self._codec, self._accept = weights, me, codec, accept
        others = set(range(len(weights))) - {me}
        self._voters = {index for index in others if weights[index]}
        self._reductions = [_Reduction(part, set(self._voters)) for part in parts]
        self._first = parts[0].start if parts else 0
        self._sums = torch.zeros(sum(part.size for part in parts), dtype=torch.float32)
        self._scratch = torch.empty(max((part.size for part in parts), default=0), dtype=torch.float32)
        self._arrived = dict.fromkeys(others, 0)  # parts of each member
        self._news = {member: asyncio.Event() for member in others}  # for whoever answers it
        self._seen: set[int] = set()  # members that opened their stream
        self._unserved = others if parts else set()
        self._all_seen, self._all_served = asyncio.Event(), asyncio.Event()  # of the voters
        if not self._unserved & self._voters:
            self._all_served.set()
        self.failures: dict[int, str] = {}

    async def run(self, own: Callable[[Part], Tensor]) -> None:
        """Add this member's own values, which `own` gives as it would send them, then wait for all averages."""
        for reduction in self._reductions:
            self._add(self._me, reduction, own(reduction.part))
            reduction.contributors.add(self._me)
            self._finish_if_complete(reduction)
            await asyncio.sleep(0)  # let streams move between parts
        if self._unserved:
            await self._drop_absent_voters()
        await asyncio.gather(*(reduction.done.wait() for reduction in self._reductions))
        self._sums = self._scratch = torch.empty(0)

    @property
    def missing(self) -> set[int]:
        """Members whose values are still to come."""
        return set().union(*(reduction.waiting for reduction in self._reductions))

    def release(self) -> None:
        """Hand over no more parts; others are served on. Their memory must not wait for the cycle collector."""
        self._accept = _nobody

    async def wait_until_served(self, limit_s: float) -> None:
        """Wait, at most `limit_s` seconds, until all voters have their averages or have dropped out."""
        if not self._all_served.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._all_served.wait()

    async def serve(self, sender: int, stream: Stream) -> None:
        """Take one other member's values from its stream, and answer with the averages."""
        if sender in self._seen or sender not in self._unserved:
            await stream.refuse("a second stream of one member, or one to a member that reduces nothing")
            return
        self._seen.add(sender)
        if self._seen >= self._voters:
            self._all_seen.set()
        answering = asyncio.create_task(self._answer(sender, stream))
        try:
            confirmed = await self._receive(sender, stream)
            await answering
            with contextlib.suppress(WireError):  # who has everything may go
                for _ in range(confirmed, len(self._reductions)):
                    await stream.receive({FrameKind.RECEIVED: 0})
        except (WireError, CodecError) as error:
            self._drop(sender, str(error))
            await stream.refuse(str(error))
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, WireError):
                await answering
            self._served(sender)

    async def _receive(self, sender: int, stream: Stream) -> int:
        """Take a member's values; returns how many averages it has confirmed meanwhile."""
        confirmed = 0
        for reduction in self._reductions if sender in self._voters else ():
            expected = {FrameKind.PART: self._codec.wire_bytes(reduction.part.size), FrameKind.RECEIVED: 0}
            while (frame := await stream.receive(expected))[0] == FrameKind.RECEIVED:
                confirmed += 1
                if confirmed > len(self._reductions):
                    raise WireError("confirmed more averages than there are")
            if sender not in reduction.waiting:
                raise WireError("was too late and has been left out")
            self._add(sender, reduction, torch.frombuffer(frame[1], dtype=torch.uint8))
            reduction.waiting.discard(sender)
            reduction.contributors.add(sender)
            self._arrived[sender] += 1
            self._news[sender].set()
            self._finish_if_complete(reduction)
        return confirmed

    async def _answer(self, sender: int, stream: Stream) -> None:
        """Say what has arrived, and send the averages; who brings no values gets them last, and slows nobody down."""
        if sender not in self._voters:
            await self._wait(self._all_served, stream)
        said, news = 0, self._news[sender]
        for reduction in self._reductions:
            while True:
                news.clear()
                while said < self._arrived[sender]:
                    await stream.send(FrameKind.ARRIVED)
                    said += 1
                if reduction.done.is_set():
                    break
                await self._wait(news, stream)
            if reduction.payload is None:
                raise WireError("the average is not finite")
            await stream.send(FrameKind.AVERAGE, *reduction.payload)

    async def _wait(self, event: asyncio.Event, stream: Stream) -> None:
        """Wait for the event, and let the other end of the stream know meanwhile that this member is alive."""
        while not event.is_set():
            try:
                async with asyncio.timeout(self._keepalive_s):
                    await event.wait()
            except TimeoutError:
                await stream.send(FrameKind.WAITING)

    async def _drop_absent_voters(self) -> None:
        """Give up on voters that have not even opened their stream; nobody waits for the other members."""
        if self._seen >= self._voters:
            return
        try:
            async with asyncio.timeout(self._silence_s):
                await self._all_seen.wait()
        except TimeoutError:
            for sender in self._voters - self._seen:
                self._drop(sender, f"sent nothing for {self._silence_s:g} s")
                self._served(sender)

    def _add(self, member: int, reduction: _Reduction, encoded: Tensor) -> None:
        weight, total = self._weights[member], self._sum_of(reduction)
        accumulate(self._codec, encoded, weight=weight, accumulator=total, scratch=self._scratch)

    def _drop(self, sender: int, reason: str) -> None:
        """Leave a member out of all parts that it has not sent."""
        self.failures.setdefault(sender, reason)
        for reduction in self._reductions:
            if sender in reduction.waiting:
                reduction.waiting.discard(sender)
                self._finish_if_complete(reduction)

    def _served(self, sender: int) -> None:
        self._unserved.discard(sender)
        if not self._unserved & self._voters:
            self._all_served.set()

    def _finish_if_complete(self, reduction: _Reduction) -> None:
        if reduction.waiting or reduction.done.is_set() or self._me not in reduction.contributors:
            return
        mean = self._sum_of(reduction).div_(sum(self._weights[index] for index in reduction.contributors))
        with contextlib.suppress(CodecError):
            encoded = memoryview(self._codec.encode(mean).numpy().data)
            mask = sum(1 << index for index in reduction.contributors)
            reduction.payload = encoded, mask.to_bytes((len(self._weights) + 7) // 8, "little")
            self._accept(reduction.part, *reduction.payload)
        reduction.done.set()
        for news in self._news.values():
            news.set()

    def _sum_of(self, reduction: _Reduction) -> Tensor:
        return self._sums[reduction.part.start - self._first : reduction.part.stop - self._first]


def _nobody(part: Part, encoded: memoryview, mask: bytes) -> None:
    """Takes parts of a reduction that is over."""
