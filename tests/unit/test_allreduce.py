"""The butterfly all-reduce of 1 to 8 members in one process over socket pairs: exact, identical, and never stuck."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from opendiloco import rounds
from opendiloco.allreduce import AllReduce, Attempt, Group, Member
from opendiloco.codec import CODECS, NonFiniteError, get_codec
from opendiloco.wire import FrameKind, Stream, WireError

SILENCE_S = 1.5  # where somebody is silent
PATIENCE_S = 20.0  # where nobody is: waiting for it would be seen
LIMIT_S = 30.0
A_LITTLE_S = 4.0  # a second for the count of bytes, the rest for a busy machine
BLOCK = 1024

every_codec = pytest.mark.parametrize("codec", list(CODECS))
Frame = tuple[int, bytes]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one block, so that small vectors have many."""
    monkeypatch.setattr(rounds, "PART_VALUES", BLOCK)


# --- a group in one process ----------------------------------------------------------------------------


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
            values=self.values[peer],
            average=self.averages[peer],
            codec=get_codec(self.codec),
            connect=connect,
            silence_s=self.silence_s,
            limit_s=LIMIT_S if peer in self.longer_limit else self.limit_s,
        )

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


# --- without faults ------------------------------------------------------------------------------------


@every_codec
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 2**20 + 1])
@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((3.0,), (1.0,)),
        ((1.0, 1.0), (0.5, 0.5)),
        ((1.0, 700.0), (0.0, 1.0)),
        ((0.25, 4096.0, 17.0), (0.2, 0.0, 0.8)),
        ((1.0,) * 5, (0.0, 0.3, 0.3, 0.0, 0.4)),
        ((0.0, 1.0), (0.0, 1.0)),
        ((2.0, 0.0, 1.0, 0.0), (0.4, 0.0, 0.6, 0.0)),
    ],
    ids=["1", "2", "2-one-reduces", "3-uneven", "5-some-reduce", "1-and-a-follower", "2-and-2-followers"],
)
def test_replicas_are_identical_and_the_average_is_right(
    codec: str, numel: int, weights: Sequence[float], shares: Sequence[float]
) -> None:
    lab = Lab(weights, shares, codec, numel)
    before = {peer: values.clone() for peer, values in lab.values.items()}
    attempts = lab.run()
    assert check_commits(lab, attempts) == list(lab.group.peers)
    assert all(set(attempt.weights) == lab.group.voters for attempt in attempts.values())
    assert not any(attempt.failures for attempt in attempts.values())
    assert all(torch.equal(lab.values[peer], before[peer]) for peer in before)


@pytest.mark.parametrize(("codec", "numel"), [("none", 2**17 + 1), ("fp16", 2**17 + 1), ("int8", 2**20 + 1)])
def test_eight_members_agree_on_many_parts(codec: str, numel: int) -> None:
    lab = Lab([1.0 + index for index in range(8)], [index / 28 for index in range(8)], codec, numel)
    assert check_commits(lab, lab.run()) == list("abcdefgh")


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e9), st.sampled_from([0.0, 0.1, 1.0])) | st.just((0.0, 0.0)),
        min_size=1,
        max_size=8,
    ).filter(lambda members: members[-1][0]),
    st.integers(0, 9000),
    st.sampled_from(list(CODECS)),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.usefixtures("small_parts")
def test_any_weights_shares_and_sizes_come_to_one_right_average(
    members: list[tuple[float, float]], numel: int, codec: str
) -> None:
    shares = [share for _, share in members]
    shares[-1] = shares[-1] or 1.0
    lab = Lab([weight for weight, _ in members], shares, codec, numel)
    assert check_commits(lab, lab.run()) == list(lab.group.peers)


def test_a_follower_takes_the_average_for_the_bytes_of_one_vector_and_sends_nothing() -> None:
    lab = Lab((1.0, 0.0, 3.0), (0.5, 0.0, 0.5), numel=2**17)
    lab.values["b"].fill_(math.nan)  # nobody looks at them
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "b", "c"]
    assert attempts["b"].received_bytes == pytest.approx(4 * lab.numel, rel=0.01)
    assert attempts["b"].sent_bytes < 1000
    assert attempts["b"].bandwidth is None


@pytest.mark.usefixtures("small_parts")
def test_voters_have_their_averages_before_followers_get_any() -> None:
    """A voter that takes its time to confirm its last average keeps the follower waiting, and nobody else."""
    seen: list[int] = []

    async def look_at_the_follower(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
        await asyncio.sleep(0.2)
        seen.append(len(lab.members["b"]._results))
        return frame

    lab = Lab((1.0, 0.0, 3.0), (1.0, 0.0, 0.0), faults={"c": Fault(FrameKind.RECEIVED, 11, look_at_the_follower)})
    assert check_commits(lab, lab.run()) == ["a", "b"]
    assert seen == [0]


def test_memory_of_an_all_reduce_that_is_over_does_not_wait_for_the_collector() -> None:
    """Vectors of the size of the model would pile up, one or two for each round."""
    lab = Lab((1.0, 2.0, 0.0), (0.5, 0.5, 0.0))
    gc.collect()
    gc.disable()
    try:
        lab.run()
        members = [weakref.ref(member) for member in lab.members.values()]
        reducers = [weakref.ref(member._reducer) for member in lab.members.values()]
        lab.members.clear()
        lab._runs.clear()
        lab._serving.clear()
        assert not any(reference() for reference in (*members, *reducers))
    finally:
        gc.enable()


@pytest.mark.usefixtures("small_parts")
def test_every_byte_sent_is_a_byte_received() -> None:
    attempts = Lab((1.0, 2.0, 3.0), (0.5, 0.2, 0.3), "int8").run().values()
    assert sum(attempt.sent_bytes for attempt in attempts) == sum(attempt.received_bytes for attempt in attempts) > 0


@pytest.mark.usefixtures("small_parts")
def test_bandwidth_is_measured_once_it_is_more_than_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = partial(Lab, (1.0, 2.0, 3.0), (0.5, 0.2, 0.3), "int8")
    assert [attempt.bandwidth for attempt in lab().run().values()] == [None, None, None]
    monkeypatch.setattr("opendiloco.allreduce.MIN_MEASURED_BYTES", 1)
    assert all(attempt.bandwidth is not None and attempt.bandwidth > 0 for attempt in lab().run().values())


def test_a_lone_member_sends_nothing_and_gets_its_own_values_through_the_codec() -> None:
    lab = Lab((2.0,), (1.0,), "fp16")
    attempt = lab.run()["a"]
    assert (attempt.sent_bytes, attempt.received_bytes, attempt.bandwidth) == (0, 0, None)
    assert torch.equal(lab.averages["a"], lab.values["a"].half().float())


@every_codec
def test_the_digest_tells_different_averages_apart(codec: str) -> None:
    digests = {Lab(weights, (0.5, 0.5), codec).run()["a"].digest for weights in ((1.0, 1.0), (1.0, 2.0))}
    assert len(digests) == 2


# --- members that fail before any of their values are in the average -----------------------------------


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "trouble",
    [{"absent": "b"}, *({"faults": {"b": Fault(FrameKind.GROUP, 0, act)}} for act in (die, freeze, send_garbage))],
    ids=["absent", "dies", "freezes", "sends garbage"],
)
def test_nobody_waits_for_a_follower_nor_misses_it(trouble: dict[str, Any]) -> None:
    lab = Lab((1.0, 0.0, 3.0), (0.5, 0.0, 0.5), **trouble)
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "c"]
    check_time(lab)


def check_time(lab: Lab, limit_s: float = 0.0) -> None:
    """All end within the limit and a little: without one, nobody waits at all."""
    assert all(lab.elapsed_s[peer] < limit_s + A_LITTLE_S for peer in lab.honest)


@every_codec
@pytest.mark.parametrize("act", BAD_VALUES)
@pytest.mark.usefixtures("small_parts")
def test_a_member_that_sends_bad_values_is_left_out_and_the_others_commit(codec: str, act: object) -> None:
    lab = Lab((1.0, 50.0, 3.0), (0.5, 0.0, 0.5), codec, faults={"b": Fault(act=act)})  # type: ignore[arg-type]
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "c"]
    for attempt in attempts.values():
        assert attempt.weights == {"a": 1.0, "c": 3.0}
        assert attempt.failures.keys() == {"b"}
        assert attempt.failures["b"].isprintable()
    check_time(lab)


@pytest.mark.parametrize("act", BAD_VALUES)
@pytest.mark.usefixtures("small_parts")
def test_bad_values_of_a_member_that_reduces_too_make_everybody_retry(act: object) -> None:
    """It has its own values in its own slice, and nobody else has them."""
    lab = Lab((1.0, 50.0, 3.0), (0.3, 0.3, 0.4), faults={"b": Fault(act=act)})  # type: ignore[arg-type]
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab)


@pytest.mark.parametrize(("share", "committed"), [(0.0, ["a", "c"]), (0.4, [])], ids=["reduces nothing", "reduces"])
def test_a_member_that_never_comes_costs_one_silence(share: float, committed: list[str]) -> None:
    lab = Lab((1.0, 1.0, 1.0), (0.3, share, 0.7), absent="b", silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == committed
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab, SILENCE_S)


@pytest.mark.parametrize(("share", "committed"), [(0.0, ["a", "c"]), (0.4, [])], ids=["reduces nothing", "reduces"])
@pytest.mark.parametrize("kind", [FrameKind.GROUP, FrameKind.PART])
def test_a_member_that_stops_before_its_first_value_costs_one_silence(
    share: float, committed: list[str], kind: FrameKind
) -> None:
    lab = Lab((1.0, 1.0, 1.0), (0.3, share, 0.7), faults={"b": Fault(kind=kind, act=freeze)}, silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == committed
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab, SILENCE_S)


@pytest.mark.parametrize(("share", "committed"), [(0.0, ["a", "c"]), (0.4, [])], ids=["reduces nothing", "reduces"])
def test_a_member_that_dies_before_its_first_value_costs_no_wait(share: float, committed: list[str]) -> None:
    """Its streams are open (they named their group) and break before a value is sent."""
    lab = Lab((1.0, 1.0, 1.0), (0.3, share, 0.7), faults={"b": Fault(act=die_when_all_streams_are_open)})
    attempts = lab.run()
    assert check_commits(lab, attempts) == committed
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab)


# --- members that fail in the middle -------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.4], ids=["reduces nothing", "reduces"])
@pytest.mark.parametrize("act", [die_when_all_streams_are_open, *BAD_VALUES])
@pytest.mark.usefixtures("small_parts")
def test_a_member_that_fails_in_the_middle_of_its_parts_makes_everybody_retry(act: object, share: float) -> None:
    """Some parts hold its values and others do not: nobody commits such a mixture, and nobody waits."""
    lab = Lab((1.0, 5.0, 1.0), (0.3, share, 0.7), faults={"b": Fault(after=2, act=act)})  # type: ignore[arg-type]
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all("b" in attempt.failures for attempt in attempts.values())
    check_time(lab)


@pytest.mark.usefixtures("small_parts")
def test_a_member_that_stops_in_the_middle_of_its_parts_costs_one_silence() -> None:
    lab = Lab((1.0, 5.0, 1.0), (0.3, 0.0, 0.7), faults={"b": Fault(after=2, act=freeze)}, silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab, SILENCE_S)


@pytest.mark.usefixtures("small_parts")
def test_values_that_reached_only_one_reducer_make_everybody_retry() -> None:
    lab = Lab((1.0, 5.0, 1.0), (0.5, 0.0, 0.5), faults={"b": Fault(act=send_nan, towards="c")})
    assert check_commits(lab, lab.run()) == []


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("act", [die_when_all_streams_are_open, *BAD_VALUES, send_mask_of_nobody])
@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_fails_while_it_answers_makes_everybody_retry(act: object, after: int) -> None:
    fault = Fault(FrameKind.AVERAGE, after, act)  # type: ignore[arg-type]
    lab = Lab((1.0, 1.0, 1.0, 1.0), (0.2, 0.4, 0.2, 0.2), faults={"b": fault})
    assert check_commits(lab, lab.run()) == []
    check_time(lab)


@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_stops_while_it_answers_costs_one_silence() -> None:
    fault = Fault(FrameKind.AVERAGE, 2, freeze)
    lab = Lab((1.0, 1.0, 1.0), (0.3, 0.4, 0.3), faults={"b": fault}, silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all("b" in attempt.failures for attempt in attempts.values())
    check_time(lab, SILENCE_S)


async def die_when_a_and_c_are_done(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    await asyncio.gather(lab.done["a"].wait(), lab.done["c"].wait())
    return await die(lab, owner, stream, frame)


@every_codec
@pytest.mark.usefixtures("small_parts")
def test_members_that_got_all_answers_of_a_dying_reducer_commit_the_same_bytes(codec: str) -> None:
    """The others learn that the round went on, and do not commit anything else."""
    fault = Fault(FrameKind.AVERAGE, 1, die_when_a_and_c_are_done, towards="d")
    lab = Lab((1.0, 2.0, 3.0, 4.0), (0.2, 0.4, 0.2, 0.2), codec, faults={"b": fault})
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "c"]
    assert attempts["a"].weights.keys() == set("abcd")
    assert attempts["d"].failures.keys() == {"b"}
    check_time(lab)


async def answer_that_others_are_awaited(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    while True:
        await Stream.send(stream, FrameKind.WAITING)
        await asyncio.sleep(0.05)


@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_is_always_waiting_ends_at_the_limit_and_is_the_only_one_blamed() -> None:
    fault = Fault(FrameKind.AVERAGE, 0, answer_that_others_are_awaited)
    lab = Lab((1.0, 1.0, 1.0), (0.3, 0.4, 0.3), faults={"b": fault}, limit_s=1.0)
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    check_time(lab, lab.limit_s)
    assert [attempt.failures.keys() for attempt in attempts.values()] == [{"b"}, {"b"}]


async def take_time(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    """Alive and never silent for long, but slower with its first values than the silence limit."""
    await asyncio.sleep(lab.silence_s * (0.5 if frame[0] == FrameKind.GROUP else 0.85))
    return frame


@pytest.mark.parametrize("silence_s", [0.4, 0.8])
@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_waits_for_a_slow_member_is_not_taken_for_dead(silence_s: float) -> None:
    """However short the silence limit is, a reducer says often enough that it is alive."""
    slow = Fault(kind=None, act=take_time)
    lab = Lab((1.0, 1.0, 1.0), (0.5, 0.0, 0.5), numel=2 * BLOCK, faults={"b": slow}, silence_s=silence_s)
    attempts = lab.run()
    assert not any(attempt.failures for attempt in attempts.values())
    assert check_commits(lab, attempts) == ["a", "c"]


# --- an attempt that is over, and one that should not have begun ---------------------------------------


@pytest.mark.usefixtures("small_parts")
def test_nothing_is_written_to_the_average_once_the_attempt_is_over() -> None:
    """The next attempt writes there: values that come late must not."""
    release: list[asyncio.Event] = []

    async def wait(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
        await release[0].wait()
        return frame

    async def look(lab: Lab) -> None:
        before = lab.averages["a"].clone()
        release[0].set()
        await lab.served("a")
        assert torch.equal(lab.averages["a"], before)

    async def reduce() -> None:
        release.append(asyncio.Event())
        await lab.reduce()

    late = {"b": Fault(act=wait)}
    lab = Lab((1.0, 1.0, 1.0), (0.5, 0.0, 0.5), faults=late, limit_s=0.3, longer_limit="b", afterwards=look)
    asyncio.run(reduce())
    assert check_commits(lab, lab.attempts) == []


@pytest.mark.usefixtures("small_parts")
def test_a_second_stream_of_one_member_is_refused_and_changes_nothing() -> None:
    refusals = []

    async def open_another(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
        if not refusals:
            refusals.append("")
            another = await lab.connect("b", "a")
            await another.send(FrameKind.GROUP, lab.group.id)
            with pytest.raises(WireError) as caught:
                await another.receive({FrameKind.AVERAGE: 1})
            refusals.append(str(caught.value))
        return frame

    lab = Lab((1.0, 1.0, 1.0), (1.0, 0.0, 0.0), faults={"b": Fault(act=open_another)})
    assert check_commits(lab, lab.run()) == ["a", "c"]
    assert refusals[1].startswith("refused: a second stream")


@pytest.mark.parametrize(("codec", "value"), [("none", math.nan), ("int8", -math.inf)])
@pytest.mark.usefixtures("small_parts")
def test_a_member_whose_own_values_are_not_finite_says_so_and_the_others_go_on(codec: str, value: float) -> None:
    unawaited = {"b": Fault()}
    lab = Lab((1.0, 1.0, 1.0), (0.5, 0.0, 0.5), codec, faults=unawaited, silence_s=SILENCE_S)
    lab.afterwards = lambda lab: lab.done["b"].wait()
    lab.values["b"][100] = value
    asyncio.run(lab.reduce())
    assert isinstance(lab.errors["b"], NonFiniteError)
    assert check_commits(lab, lab.attempts) == ["a", "c"]
    assert all(attempt.weights.keys() == {"a", "c"} for attempt in lab.attempts.values())


# --- everything at once --------------------------------------------------------------------------------

faults = st.builds(
    Fault,
    kind=st.sampled_from([FrameKind.PART, FrameKind.AVERAGE]),
    after=st.integers(0, 5),
    act=st.sampled_from([die_when_all_streams_are_open, *BAD_VALUES]),
    towards=st.sampled_from(["", "a"]),
)


@given(
    st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=5),
    st.dictionaries(st.sampled_from("bcde"), faults, min_size=1, max_size=2),
    st.sampled_from(list(CODECS)),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.usefixtures("small_parts")
def test_whatever_goes_wrong_all_commits_are_one_right_average(
    shares: list[float], faults: dict[str, Fault], codec: str
) -> None:
    """Faults are seen at once here: connections break, or what comes is wrong."""
    shares[0] = 0.5
    present = {peer: fault for peer, fault in faults.items() if peer in "abcde"[: len(shares)]}
    lab = Lab([1.0 + index for index in range(len(shares))], shares, codec, faults=present)
    check_commits(lab, lab.run())
    check_time(lab)


@pytest.mark.parametrize(
    "act", [die_when_all_streams_are_open, send_nan, send_too_much], ids=["dies", "not finite", "too much"]
)
@pytest.mark.usefixtures("small_parts")
def test_hundreds_of_failing_attempts_leave_memory_threads_and_handles_as_they_were(
    act: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("allreduce", "wire"):
        monkeypatch.setattr(f"opendiloco.{module}.LINGER_S", 0.01)
    process = psutil.Process()

    def fail(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            Lab((1.0, 5.0, 1.0), (0.3, 0.4, 0.3), faults={"b": Fault(after=2, act=act)}).run()  # type: ignore[arg-type]
        gc.collect()
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    before = fail(30)
    after = fail(150)
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 20e6
