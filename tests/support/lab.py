"""A group of 1 to 8 members in one process over socket pairs, faults of chosen members, and what must hold."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from opendiloco import rounds
from opendiloco.allreduce import AllReduce, Attempt, Group, Member
from opendiloco.codec import CODECS, get_codec
from opendiloco.wire import FrameKind, Stream, WireError

SILENCE_S = 1.5  # where somebody is silent
PATIENCE_S = 20.0  # where nobody is: waiting for it would be seen
LIMIT_S = 30.0
A_LITTLE_S = 4.0  # a second for the count of bytes, the rest for a busy machine
BLOCK = 1024

every_codec = pytest.mark.parametrize("codec", list(CODECS))
Frame = tuple[int, bytes]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one block, so that small vectors have many."""
    monkeypatch.setattr(rounds, "PART_VALUES", BLOCK)


@dataclass
class Fault:
    """What a member does instead of sending its `after`-th frame (from 0, per stream) of `kind`, and later ones."""

    kind: FrameKind | None = FrameKind.PART
    after: int = 0
    act: Callable[[Lab, str, FaultyStream, Frame], Awaitable[Frame]] | None = None
    towards: str = ""
    """Only on streams of this member; all when empty."""
    frozen: bool = False


class FaultyStream(Stream):
    """The stream of a member with a fault."""

    def __init__(
        self, lab: Lab, ends: tuple[str, str], pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        super().__init__(*pipe, timeout_s=lab.silence_s)
        self.raw, self._lab, (self._owner, self._other) = pipe[1], lab, ends
        self._sent: dict[int, int] = {}

    async def send(self, kind: FrameKind, *payloads: bytes | memoryview) -> None:
        fault = self._lab.faults[self._owner]
        if fault.frozen:
            await forever()
        index = self._sent.get(kind, 0)
        self._sent[kind] = index + 1
        applies = kind == (fault.kind or kind) and index >= fault.after and fault.towards in ("", self._other)
        if applies and fault.act is not None:
            changed, payload = await fault.act(self._lab, self._owner, self, (kind, b"".join(map(bytes, payloads))))
            await super().send(changed, payload)  # type: ignore[arg-type]
        else:
            await super().send(kind, *payloads)


@dataclass
class Lab:
    """Members "a", "b", ... of one group. Those in `faults` misbehave, those in `absent` do not exist."""

    weights: Sequence[float]
    shares: Sequence[float]
    codec: str = "none"
    numel: int = 12 * BLOCK
    faults: dict[str, Fault] = field(default_factory=dict)
    absent: str = ""
    silence_s: float = PATIENCE_S
    limit_s: float = LIMIT_S
    longer_limit: str = ""
    """Members whose limit is LIMIT_S whatever that of the others."""
    afterwards: Callable[[Lab], Awaitable[object]] | None = None
    """Called when all honest members are done."""
    elapsed_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        peers = "abcdefgh"[: len(self.weights)]
        members = [
            Member(peer, weight, tokens, share)
            for tokens, (peer, weight, share) in enumerate(zip(peers, self.weights, self.shares, strict=True))
        ]
        self.group = Group(bytes(range(16)), tuple(members))
        generator = torch.Generator().manual_seed(len(peers) + self.numel)
        self.values = {peer: torch.randn(self.numel, generator=generator) for peer in peers}
        self.averages = {peer: torch.full((self.numel,), 777.0) for peer in peers}
        self.members: dict[str, AllReduce] = {}
        self.opened: dict[str, set[str]] = {peer: set() for peer in peers}
        self.done: dict[str, asyncio.Event] = {}
        self.attempts: dict[str, Attempt] = {}
        self.errors: dict[str, BaseException] = {}
        self._runs: dict[str, asyncio.Task[Attempt]] = {}
        self._serving: dict[str, list[asyncio.Task[None]]] = {peer: [] for peer in peers}
        self._pipes: dict[str, list[asyncio.StreamWriter]] = {peer: [] for peer in peers}
        self._dead = set(self.absent)

    @property
    def honest(self) -> list[str]:
        return [peer for peer in self.group.peers if peer not in self.faults and peer not in self.absent]

    def run(self) -> dict[str, Attempt]:
        """What the all-reduce came to at every honest member."""
        asyncio.run(self.reduce())
        assert not self.errors
        return self.attempts

    async def reduce(self) -> None:
        present = [peer for peer in self.group.peers if peer not in self.absent]
        self.members = {peer: self._member(peer) for peer in present}
        self.done = {peer: asyncio.Event() for peer in present}
        try:
            async with asyncio.timeout(self.limit_s + 10):  # ends a test that would hang
                self._runs = {peer: asyncio.create_task(self._timed_run(peer)) for peer in present}
                self.attempts = {peer: await self._runs[peer] for peer in self.honest}
                if self.afterwards is not None:
                    await self.afterwards(self)
        finally:
            await self._end()

    async def served(self, peer: str) -> None:
        """Wait until no other member has a stream open at `peer`."""
        await asyncio.gather(*self._serving[peer])

    def is_dead(self, peer: str) -> bool:
        return peer in self._dead

    def kill(self, peer: str) -> None:
        """End a member as kill -9 would: its streams break, it answers nobody any more."""
        self._dead.add(peer)
        for task in (self._runs[peer], *self._serving[peer]):
            task.cancel()
        for writer in self._pipes[peer]:
            abort(writer)

    async def connect(self, sender: str, peer: str) -> Stream:
        """A stream of `sender` to `peer`, whose end is served as the network process does it."""
        if {sender, peer} & self._dead:
            raise WireError("cannot be reached (nobody listens)")
        near, far = socket.socketpair()
        here, there = await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)
        self._pipes[sender].append(here[1])
        self._pipes[peer].append(there[1])
        serving = asyncio.create_task(self._serve(peer, sender, self._stream((peer, sender), there)))
        self._serving[peer].append(serving)
        return self._stream((sender, peer), here)

    def _member(self, peer: str) -> AllReduce:
        async def connect(other: str) -> Stream:
            return await self.connect(peer, other)

        return AllReduce(
            self.group,
            peer,
            values=self._encoded(peer),
            average=self.averages[peer],
            codec=get_codec(self.codec),
            connect=connect,
            silence_s=self.silence_s,
            limit_s=LIMIT_S if peer in self.longer_limit else self.limit_s,
        )

    def _encoded(self, peer: str) -> Tensor:
        codec = get_codec(self.codec)
        if peer in self.group.voters:
            return codec.encode(self.values[peer])
        return torch.full((codec.wire_bytes(self.numel),), 255, dtype=torch.uint8)  # nobody looks at a follower's

    async def _timed_run(self, peer: str) -> Attempt:
        started = time.monotonic()
        try:
            return await self.members[peer].run()
        finally:
            self.elapsed_s[peer] = time.monotonic() - started
            self.done[peer].set()

    def _stream(self, ends: tuple[str, str], pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> Stream:
        return FaultyStream(self, ends, pipe) if ends[0] in self.faults else Stream(*pipe, timeout_s=self.silence_s)

    async def _serve(self, peer: str, sender: str, stream: Stream) -> None:
        with contextlib.suppress(WireError):
            await stream.receive({FrameKind.GROUP: 16})
            self.opened[peer].add(sender)
            await self.members[peer].serve(sender, stream)
        stream.close()

    async def _end(self) -> None:
        serving = [task for tasks in self._serving.values() for task in tasks]
        for task in (*self._runs.values(), *serving):
            task.cancel()
        for peer, run in self._runs.items():
            await asyncio.wait({run})
            if not run.cancelled() and (error := run.exception()) is not None:
                self.errors[peer] = error
        served = await asyncio.gather(*serving, return_exceptions=True)
        for writers in self._pipes.values():
            for writer in writers:
                abort(writer)
        await asyncio.sleep(0)  # the transports close their sockets in the next turn of the loop
        assert not [error for error in served if isinstance(error, Exception)]


def abort(writer: asyncio.StreamWriter) -> None:
    if writer.get_extra_info("socket").fileno() >= 0:  # a transport that is closed already cannot be aborted
        writer.transport.abort()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


# Acts of a Fault.


async def die(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    lab.kill(owner)
    await forever()
    return frame


async def die_when_all_streams_are_open(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    others = [member.peer for member in lab.group.members if member.share and member.peer != owner]
    while not all(owner in lab.opened[other] or lab.is_dead(other) for other in others):
        await asyncio.sleep(0)
    return await die(lab, owner, stream, frame)


async def freeze(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    """As SIGSTOP: connections stay open, nothing is sent any more."""
    lab.faults[owner].frozen = True
    await forever()
    return frame


async def send_nan(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    """All bits set: NaN as fp32, as fp16 and as the scale of an int8 block."""
    return frame[0], b"\xff" * len(frame[1])


async def send_too_little(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    return frame[0], frame[1][:-1]


async def send_too_much(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    return frame[0], frame[1] * 2


async def send_another_kind(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    return FrameKind.GROUP, frame[1]


async def send_garbage(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    stream.raw.write(bytes(range(255, 0, -1)))
    return frame


async def send_mask_of_nobody(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    return frame[0], frame[1][:-1] + b"\0"


BAD_VALUES = [send_nan, send_too_little, send_too_much, send_another_kind, send_garbage]


def error_bound(lab: Lab, participants: Sequence[str]) -> Tensor:
    """Largest error (fp64 [numel]) that the codec may make, sending and answering, and fp32 sums on top."""
    weights = {member.peer: member.weight for member in lab.group.members}
    total = sum(weights[peer] for peer in participants)

    def once(values: Tensor) -> Tensor:
        if lab.codec == "none":
            return torch.zeros_like(values)
        if lab.codec == "fp16":
            return torch.clamp(values.abs() * 2**-11, min=2**-25)
        padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
        step = (padded.amax(1) / 127).clamp(min=2.0**-126)
        return (step / 2 * (1 + 2**-15)).repeat_interleave(BLOCK)[: len(values)]

    sizes = [lab.values[peer].double() for peer in participants]
    sent = sum(once(v) * weights[p] for p, v in zip(participants, sizes, strict=True)) / total
    rounding = (
        2.0**-22 * len(sizes) * sum(v.abs() * weights[p] for p, v in zip(participants, sizes, strict=True)) / total
    )
    largest = exact_mean(lab, participants).abs() + sent + rounding
    return sent + rounding + once(largest)


def exact_mean(lab: Lab, participants: Sequence[str]) -> Tensor:
    weights = {member.peer: member.weight for member in lab.group.members}
    total = math.fsum(weights[peer] for peer in participants)
    zero = torch.zeros(lab.numel, dtype=torch.float64)
    return sum((lab.values[peer].double() * (weights[peer] / total) for peer in participants), start=zero)


def check_commits(lab: Lab, attempts: dict[str, Attempt]) -> list[str]:
    """All commits are one and the same, and that one is right; returns who committed."""
    committed = {peer: attempt for peer, attempt in attempts.items() if attempt.verdict == "commit"}
    for peer, attempt in attempts.items():
        if peer not in committed:
            assert attempt.verdict == "retry"
            assert attempt.weights == attempt.tokens == {}
    if committed:
        first, attempt = next(iter(committed.items()))
        assert len({(a.digest, tuple(sorted(a.weights.items()))) for a in committed.values()}) == 1
        assert len({lab.averages[peer].numpy().tobytes() for peer in committed}) == 1
        participants = sorted(attempt.weights)
        assert attempt.weights == {m.peer: m.weight for m in lab.group.members if m.peer in participants}
        assert attempt.tokens == {m.peer: m.tokens for m in lab.group.members if m.peer in participants}
        error = (lab.averages[first].double() - exact_mean(lab, participants)).abs()
        assert bool((error <= error_bound(lab, participants)).all())
    return sorted(committed)


def check_time(lab: Lab, limit_s: float = 0.0) -> None:
    """All end within the limit and a little: without one, nobody waits at all."""
    assert all(lab.elapsed_s[peer] < limit_s + A_LITTLE_S for peer in lab.honest)
