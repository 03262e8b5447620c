"""Butterfly all-reduce of one flat vector among the members of a group, with a lossy codec and identical results.

Each member reduces one slice (`reducer.Reducer`) and sends the rest of its values, which it gets encoded, to the
reducers of the other slices. An average is encoded once and everybody, its reducer included, decodes the same bytes.
Every reply says whose values are in it, so that all members see the same participants or none commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import blake3
import torch
from torch import Tensor

from opendiloco.codec import Codec, CodecError
from opendiloco.ledger import Reading
from opendiloco.pace import Pace
from opendiloco.reducer import Reducer
from opendiloco.rounds import Part, Verdict, plan_parts, verdict
from opendiloco.wire import FrameKind, Stream, WireError

LINGER_S = 1.0
MIN_MEASURED_BYTES = 500_000  # below that, latency is all one sees

Connect = Callable[[str], Awaitable[Stream]]


@dataclass(frozen=True)
class Member:
    """One peer of a group."""

    peer: str
    weight: float
    """Of its values in the average; 0: it sends none, and only takes the average."""
    tokens: int
    """It trained on in this round."""
    share: float
    """Of the vector that it reduces."""
    readings: tuple[Reading, ...] = ()
    """How far it has read the text."""


@dataclass(frozen=True)
class Group:
    """The members of one all-reduce, sorted by peer id; `id` (16 random bytes) names this attempt."""

    id: bytes
    members: tuple[Member, ...]
    quorum: int = 1
    """Fewest voters whose values may make a round: more than half of the workers that were alive at the start."""
    live: int = 1
    """Workers that were alive then, members or not."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Peer ids of the members, sorted."""
        return tuple(member.peer for member in self.members)

    @property
    def voters(self) -> frozenset[str]:
        """Peer ids of the members that send values."""
        return frozenset(member.peer for member in self.members if member.weight)


@dataclass(frozen=True)
class Attempt:
    """What an all-reduce came to at this peer."""

    verdict: Verdict
    weights: dict[str, float]
    """Weight of every peer in the average; empty unless the verdict is commit."""
    tokens: dict[str, int]
    """Tokens that every peer in the average trained on."""
    readings: dict[str, tuple[Reading, ...]]
    """How far every peer in the average has read the text."""
    digest: str
    """BLAKE3 of the averaged bytes, parts in the order of the vector."""
    parts: list[int]
    """Values in each part."""
    payload: list[memoryview]
    """The averaged bytes as they travelled, part by part; empty unless the verdict is commit."""
    failures: dict[str, str]
    """Peers that dropped out, and how this peer noticed."""
    sent_bytes: int
    received_bytes: int
    bandwidth: float | None
    """Bytes per second that the others got from this peer, together; None when that was too little to tell."""


class AllReduce:
    """One attempt of one member. `run` does this member's part; `serve` answers another member's stream."""

    def __init__(
        self,
        group: Group,
        peer: str,
        *,
        values: Tensor,  # uint8 [wire_bytes(N)], this member's, encoded; only read
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
        numel = average.numel()
        self._me = group.peers.index(peer)
        self._votes = peer in group.voters
        shares = [member.share for member in group.members]
        self._plan = plan_parts(numel, shares, alignment=codec.alignment)
        self._mask_bytes = (len(group.members) + 7) // 8
        weights = [member.weight for member in group.members]
        self._reducer = Reducer(
            self._plan[self._me], weights, self._me, codec=codec, accept=self._accept, silence_s=silence_s
        )
        totals = {index: self._wire_bytes(index) for index in range(len(self._plan)) if index != self._me}
        self._pace = Pace(totals if self._votes else {})
        self._results: dict[Part, tuple[memoryview, bytes]] = {}
        self._failures: dict[int, str] = {}
        self._is_over = False
        self._streams: list[Stream] = []
        self._started = 0.0
        self._arrived_s: dict[int, float] = {}

    async def run(self) -> Attempt:
        """Send this member's values and collect all averages; members that fail end up in `Attempt.failures`."""
        self._started = time.monotonic()
        waiting = {index for index in range(len(self.group.members)) if index != self._me and self._plan[index]}
        try:
            async with asyncio.timeout(self._limit_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._reducer.run(self._own))
                for index in tuple(waiting):
                    tasks.create_task(self._exchange(index)).add_done_callback(partial(_strike_off, waiting, index))
            await self._reducer.wait_until_served(LINGER_S)  # for the count of bytes
        except TimeoutError:
            for index in waiting | self._reducer.missing:
                self._failures.setdefault(index, f"not done after {self._limit_s:g} s")
        finally:
            self._is_over = True
            self._reducer.release()
        return self._conclude()

    async def serve(self, peer: str, stream: Stream) -> None:
        """Reduce what another member sends on `stream`, and answer with the averages."""
        self._streams.append(stream)
        await self._reducer.serve(self.group.peers.index(peer), stream)

    async def _exchange(self, reducer: int) -> None:
        """Send one reducer its slice of this member's values, and take the averages it answers with."""
        try:
            stream = await self._connect(self.group.members[reducer].peer)
        except WireError as error:
            self._failures.setdefault(reducer, str(error))
            self._pace.leave(reducer)
            return
        self._streams.append(stream)
        sending = asyncio.create_task(self._send(reducer, stream))
        try:
            for part in self._plan[reducer]:
                self._accept(part, *await self._receive_average(reducer, part, stream))
                await stream.send(FrameKind.RECEIVED)
        except (WireError, CodecError) as error:
            self._failures.setdefault(reducer, str(error))
        finally:
            self._pace.leave(reducer)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, WireError):
                await sending
            stream.close()

    async def _send(self, reducer: int, stream: Stream) -> None:
        await stream.send(FrameKind.GROUP, self.group.id)
        for part in self._plan[reducer] if self._votes else ():
            values = memoryview(self._own(part).numpy().data)
            await self._pace.turn(reducer, len(values))
            await stream.send(FrameKind.PART, values)

    def _own(self, part: Part) -> Tensor:
        return self._codec.cut(self._values, self._average.numel(), slice(part.start, part.stop))

    async def _receive_average(self, reducer: int, part: Part, stream: Stream) -> tuple[memoryview, bytes]:
        size = self._codec.wire_bytes(part.size)
        while True:
            expected = {FrameKind.AVERAGE: size + self._mask_bytes, FrameKind.WAITING: 0, FrameKind.ARRIVED: 0}
            kind, payload = await stream.receive(expected)
            if kind == FrameKind.AVERAGE:
                return memoryview(payload)[:size], bytes(payload[size:])
            if kind == FrameKind.ARRIVED:
                self._pace.arrived(reducer)
            if kind == FrameKind.ARRIVED and self._pace.is_done(reducer):
                self._arrived_s.setdefault(reducer, time.monotonic() - self._started)

    def _accept(self, part: Part, encoded: memoryview, mask: bytes) -> None:
        """Decode an averaged part; every member decodes the same bytes. Too late, it is nobody's any more."""
        if self._is_over:
            return
        data = torch.frombuffer(encoded, dtype=torch.uint8)
        self._codec.decode(data, self._average[part.start : part.stop])
        self._results[part] = encoded, mask

    def _conclude(self) -> Attempt:
        parts = [part for parts in self._plan for part in parts]
        missing = sum(part not in self._results for part in parts)
        masks = {self._contributors(mask) for _, mask in self._results.values()}
        decision = verdict(self.group.voters, masks, missing, quorum=self.group.quorum)
        committed = next(iter(masks), self.group.voters) if decision == "commit" else frozenset()
        digest = blake3.blake3()
        for part in parts:
            if part in self._results:
                digest.update(self._results[part][0])
        participants = [member for member in self.group.members if member.peer in committed]
        failures = self._reducer.failures | self._failures
        results, self._results = self._results, {}
        return Attempt(
            verdict=decision,
            weights={member.peer: member.weight for member in participants},
            tokens={member.peer: member.tokens for member in participants},
            readings={member.peer: member.readings for member in participants},
            digest=digest.hexdigest(),
            parts=[part.size for part in parts],
            payload=[results[part][0] for part in parts] if decision == "commit" else [],
            failures={self.group.members[index].peer: reason for index, reason in failures.items()},
            sent_bytes=sum(stream.sent_bytes for stream in self._streams),
            received_bytes=sum(stream.received_bytes for stream in self._streams),
            bandwidth=self._bandwidth(),
        )

    def _bandwidth(self) -> float | None:
        """From what half of the others had by when: a receiver that is slow itself does not count against this peer."""
        if not self._arrived_s:
            return None
        half_s = statistics.median_high(self._arrived_s.values())
        size = sum(self._wire_bytes(index) for index, at_s in self._arrived_s.items() if at_s <= half_s)
        return size / max(half_s, 1e-6) if size >= MIN_MEASURED_BYTES else None

    def _wire_bytes(self, reducer: int) -> int:
        """Of this member's values for one reducer."""
        return sum(self._codec.wire_bytes(part.size) for part in self._plan[reducer])

    def _contributors(self, mask: bytes) -> frozenset[str]:
        bits = int.from_bytes(mask, "little")
        return self.group.voters & {peer for index, peer in enumerate(self.group.peers) if bits >> index & 1}


def _strike_off(waiting: set[int], index: int, exchange: asyncio.Task[None]) -> None:
    if not exchange.cancelled():
        waiting.discard(index)
