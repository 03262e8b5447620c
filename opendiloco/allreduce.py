"""Butterfly all-reduce of one flat vector among the members of a group, with a lossy codec and identical results.

Each member reduces one slice: it decodes what the others send, averages in fp32 with the weights of those who
really sent, encodes the average once and sends the same bytes to everybody; it uses the decoded bytes itself too.
Every reply says whose values are in it. Nothing is written to the caller's average unless the whole vector came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import blake3
import torch
from torch import Tensor

from opendiloco.codec import Codec, CodecError, accumulate
from opendiloco.rounds import Part, Verdict, plan_parts, verdict
from opendiloco.wire import FrameKind, Stream, WireError

KEEPALIVE_S = 1.0

Connect = Callable[[str], Awaitable[Stream]]


@dataclass(frozen=True)
class Member:
    """One peer of a group: `weight` of its values in the average, `share` of the vector that it reduces."""

    peer: str
    weight: float
    tokens: int
    share: float


@dataclass(frozen=True)
class Group:
    """The members of one all-reduce, sorted by peer id; `id` is random and names this attempt."""

    id: bytes
    members: tuple[Member, ...]

    @property
    def peers(self) -> tuple[str, ...]:
        """Peer ids of the members, sorted."""
        return tuple(member.peer for member in self.members)


@dataclass(frozen=True)
class Attempt:
    """What an all-reduce came to at this peer."""

    verdict: Verdict
    weights: dict[str, float]
    """Weight of every peer in the average; empty unless the verdict is commit."""
    tokens: dict[str, int]
    """Tokens that every peer in the average trained on."""
    digest: str
    """BLAKE3 of the averaged bytes, parts in the order of the vector."""
    failures: dict[str, str]
    """Peers that dropped out, and how this peer noticed."""
    sent_bytes: int
    received_bytes: int
    bandwidth: float
    """Bytes per second this peer sent while it had something to send; 0 when it sent nothing."""


@dataclass
class _Reduction:
    """One part at its reducer."""

    part: Part
    waiting: set[int]
    """Members whose values are still to come."""
    contributors: set[int] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    payload: tuple[memoryview, bytes] | None = None
    """Encoded average and mask of contributors, once done; None when the average is not finite."""


class AllReduce:
    """One attempt of one member. `run` does this member's part; `serve` answers each other member's stream."""

    def __init__(
        self,
        group: Group,
        peer: str,
        *,
        values: Tensor,  # fp32 [N], this member's; not changed
        average: Tensor,  # fp32 [N], written as parts come in; valid after a commit only
        codec: Codec,
        connect: Connect,
        silence_s: float,
        limit_s: float,
    ) -> None:
        """Args: `silence_s` after which a member counts as dropped; `limit_s` for the whole attempt."""
        self.group, self._codec, self._connect = group, codec, connect
        self._silence_s, self._limit_s = silence_s, limit_s
        self._values, self._average = values, average
        self._me = group.peers.index(peer)
        shares = [member.share for member in group.members]
        self._plan = plan_parts(values.numel(), shares, alignment=codec.alignment)
        self._mask_bytes = (len(group.members) + 7) // 8
        everybody = set(range(len(group.members)))
        self._reductions = [_Reduction(part, everybody - {self._me}) for part in self._plan[self._me]]
        slice_size = sum(part.size for part in self._plan[self._me])
        self._sums = torch.zeros(slice_size, dtype=torch.float32)
        largest = max((part.size for parts in self._plan for part in parts), default=0)
        self._scratch = torch.empty(largest, dtype=torch.float32)
        self._results: dict[Part, tuple[memoryview, bytes]] = {}
        self._failures: dict[int, str] = {}
        self._seen: set[int] = set()  # members that opened their stream
        self._all_seen, self._all_served = asyncio.Event(), asyncio.Event()
        self._unserved = everybody - {self._me} if self._reductions else set()
        self._streams: list[Stream] = []
        self._rates: list[float] = []

    async def run(self) -> Attempt:
        """Send this member's values and collect all averages; members that fail end up in `Attempt.failures`."""
        others = [index for index in range(len(self.group.members)) if index != self._me]
        reducers = [index for index in others if self._plan[index]]
        try:
            async with asyncio.timeout(self._limit_s), asyncio.TaskGroup() as tasks:
                if self._reductions:
                    tasks.create_task(self._contribute_own())
                    tasks.create_task(self._drop_absent())
                for index in reducers:
                    tasks.create_task(self._exchange(index))
        except TimeoutError:
            for index in reducers:
                self._failures.setdefault(index, f"not done after {self._limit_s:.0f} s")
        if self._unserved:  # they have nearly all of it: this is for the count of bytes, not for them
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._all_served.wait()
        return self._conclude()

    async def serve(self, peer: str, stream: Stream) -> None:
        """Reduce what another member sends on `stream`, and answer with the averages."""
        sender = self.group.peers.index(peer)
        if sender in self._seen or not self._reductions:
            await stream.refuse("a second stream of one member, or one to a member that reduces nothing")
            return
        self._streams.append(stream)
        self._seen.add(sender)
        if len(self._seen) == len(self.group.members) - 1:
            self._all_seen.set()
        answering = asyncio.create_task(self._answer(stream))
        try:
            await self._receive(sender, stream)
            await answering
        except (WireError, CodecError) as error:
            self._drop(sender, str(error))
            await stream.refuse(str(error))
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, WireError):
                await answering
            self._unserved.discard(sender)
            if not self._unserved:
                self._all_served.set()

    # --- as a reducer ------------------------------------------------------------------------------------

    async def _receive(self, sender: int, stream: Stream) -> None:
        weight = self.group.members[sender].weight
        for reduction in self._reductions:
            expected = {FrameKind.PART: self._codec.wire_bytes(reduction.part.size)}
            _, payload = await stream.receive(expected)
            if sender not in reduction.waiting:
                raise WireError("was too late and has been left out")
            data = torch.frombuffer(payload, dtype=torch.uint8)
            accumulate(self._codec, data, weight=weight, accumulator=self._sum_of(reduction), scratch=self._scratch)
            self._arrived(sender, reduction)

    async def _answer(self, stream: Stream) -> None:
        for reduction in self._reductions:
            while not reduction.done.is_set():
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await reduction.done.wait()
                except TimeoutError:
                    await stream.send(FrameKind.WAITING)
            if reduction.payload is None:
                raise WireError("the average is not finite")
            await stream.send(FrameKind.AVERAGE, *reduction.payload)

    async def _contribute_own(self) -> None:
        weight = self.group.members[self._me].weight
        for reduction in self._reductions:
            own = self._values[reduction.part.start : reduction.part.stop]
            self._sum_of(reduction).add_(own * weight)
            reduction.contributors.add(self._me)
            self._finish_if_complete(reduction)
            await asyncio.sleep(0)  # let streams move between parts
        await asyncio.gather(*(reduction.done.wait() for reduction in self._reductions))

    async def _drop_absent(self) -> None:
        """Give up on members that have not even opened their stream."""
        if len(self.group.members) == 1:
            return
        try:
            async with asyncio.timeout(self._silence_s):
                await self._all_seen.wait()
        except TimeoutError:
            for index in range(len(self.group.members)):
                if index != self._me and index not in self._seen:
                    self._drop(index, f"sent nothing for {self._silence_s:g} s")

    def _arrived(self, sender: int, reduction: _Reduction) -> None:
        reduction.waiting.discard(sender)
        reduction.contributors.add(sender)
        self._finish_if_complete(reduction)

    def _drop(self, sender: int, reason: str) -> None:
        """Leave a member out of all parts that it has not sent."""
        self._failures.setdefault(sender, reason)
        for reduction in self._reductions:
            if sender in reduction.waiting:
                reduction.waiting.discard(sender)
                self._finish_if_complete(reduction)

    def _finish_if_complete(self, reduction: _Reduction) -> None:
        if reduction.waiting or reduction.done.is_set() or self._me not in reduction.contributors:
            return
        total = sum(self.group.members[index].weight for index in reduction.contributors)
        mean = self._sum_of(reduction).div_(total)
        with contextlib.suppress(CodecError):
            encoded = self._codec.encode(mean)
            mask = sum(1 << index for index in reduction.contributors)
            reduction.payload = _view(encoded), mask.to_bytes(self._mask_bytes, "little")
            self._accept(reduction.part, *reduction.payload)
        reduction.done.set()

    def _sum_of(self, reduction: _Reduction) -> Tensor:
        first = self._plan[self._me][0].start
        return self._sums[reduction.part.start - first : reduction.part.stop - first]

    # --- as a sender -------------------------------------------------------------------------------------

    async def _exchange(self, reducer: int) -> None:
        """Send one reducer its slice of this member's values, and take the averages it answers with."""
        try:
            stream = await self._connect(self.group.members[reducer].peer)
        except WireError as error:
            self._failures.setdefault(reducer, str(error))
            return
        self._streams.append(stream)
        sending = asyncio.create_task(self._send(reducer, stream))
        try:
            for part in self._plan[reducer]:
                self._accept(part, *await self._receive_average(part, stream))
        except (WireError, CodecError) as error:
            self._failures.setdefault(reducer, str(error))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, WireError):
                await sending
            stream.close()

    async def _send(self, reducer: int, stream: Stream) -> None:
        started, before = time.monotonic(), stream.sent_bytes
        await stream.send(FrameKind.GROUP, self.group.id)
        for part in self._plan[reducer]:
            encoded = self._codec.encode(self._values[part.start : part.stop])
            await stream.send(FrameKind.PART, _view(encoded))
        self._rates.append((stream.sent_bytes - before) / max(time.monotonic() - started, 1e-6))

    async def _receive_average(self, part: Part, stream: Stream) -> tuple[memoryview, bytes]:
        size = self._codec.wire_bytes(part.size)
        while True:
            expected = {FrameKind.AVERAGE: size + self._mask_bytes, FrameKind.WAITING: 0}
            kind, payload = await stream.receive(expected)
            if kind == FrameKind.AVERAGE:
                return memoryview(payload)[:size], bytes(payload[size:])

    def _accept(self, part: Part, encoded: memoryview, mask: bytes) -> None:
        """Decode an averaged part; every member decodes the same bytes."""
        data = torch.frombuffer(encoded, dtype=torch.uint8)
        self._codec.decode(data, self._average[part.start : part.stop])
        self._results[part] = encoded, mask

    # --- the end -----------------------------------------------------------------------------------------

    def _conclude(self) -> Attempt:
        parts = [part for parts in self._plan for part in parts]
        missing = sum(part not in self._results for part in parts)
        masks = {self._contributors(mask) for _, mask in self._results.values()}
        decision = verdict(self.group.peers, masks, missing)
        committed = next(iter(masks), frozenset(self.group.peers)) if decision == "commit" else frozenset()
        digest = blake3.blake3()
        for part in parts:
            if part in self._results:
                digest.update(self._results[part][0])
        participants = [member for member in self.group.members if member.peer in committed]
        return Attempt(
            verdict=decision,
            weights={member.peer: member.weight for member in participants},
            tokens={member.peer: member.tokens for member in participants},
            digest=digest.hexdigest(),
            failures={self.group.members[index].peer: reason for index, reason in self._failures.items()},
            sent_bytes=sum(stream.sent_bytes for stream in self._streams),
            received_bytes=sum(stream.received_bytes for stream in self._streams),
            bandwidth=sum(self._rates),
        )

    def _contributors(self, mask: bytes) -> frozenset[str]:
        bits = int.from_bytes(mask, "little")
        return frozenset(peer for index, peer in enumerate(self.group.peers) if bits >> index & 1)


def _view(encoded: Tensor) -> memoryview:
    """The bytes of a uint8 tensor, not copied."""
    return memoryview(encoded.numpy().data)
