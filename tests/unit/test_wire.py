"""Frames: whatever the other side sends or leaves unsent ends in a WireError that says so, in time and in bounds."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.wire import MAX_REASON_BYTES, FrameKind, Stream, WireError

SILENCE_S = 0.1
HEADER_BYTES = 5
PART = {FrameKind.PART: 10}


class Wire:
    """A Stream, and the raw other end of its connection."""

    def __init__(self, stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.stream, self.reader, self.writer = stream, reader, writer

    def put(self, kind: int, length: int, payload: bytes = b"") -> None:
        self.writer.write(struct.pack("<BI", kind, length) + payload)


@asynccontextmanager
async def connected(*, timeout_s: float = 5.0) -> AsyncIterator[Wire]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    raw_reader, raw_writer = await asyncio.open_connection(sock=theirs)
    try:
        yield Wire(Stream(reader, writer, timeout_s=timeout_s), raw_reader, raw_writer)
    finally:
        for each in (writer, raw_writer):
            if each.get_extra_info("socket").fileno() >= 0:  # a transport that is closed cannot be aborted
                each.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets in the next turn of the loop


def with_wire(test: Callable[[Wire], Awaitable[None]], *, timeout_s: float = 5.0) -> None:
    async def run() -> None:
        async with connected(timeout_s=timeout_s) as wire:
            await test(wire)

    asyncio.run(run())


def error_of(kind: int, length: int, payload: bytes = b"", *, expected: dict[FrameKind, int] | None = None) -> str:
    """What a stream that waits for `expected` says about one frame."""
    found: list[str] = []

    async def test(wire: Wire) -> None:
        wire.put(kind, length, payload)
        with pytest.raises(WireError) as caught:
            await wire.stream.receive(expected or PART)
        found.append(str(caught.value))

    with_wire(test)
    return found[0]


# --- what arrives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[0], [1], [10], [64 * 1024], [64 * 1024 + 1], [3_000_000], [0, 5, 0, 70_000, 1]])
def test_payloads_arrive_whole_and_both_ends_count_the_same_bytes(sizes: list[int]) -> None:
    payloads = [bytes(range(256)) * (size // 256 + 1) for size in sizes]
    payloads = [payload[:size] for payload, size in zip(payloads, sizes, strict=True)]

    async def test(wire: Wire) -> None:
        other = Stream(wire.reader, wire.writer, timeout_s=5.0)
        sending = asyncio.create_task(wire.stream.send(FrameKind.PART, *payloads, memoryview(b"end")))
        kind, received = await other.receive({FrameKind.PART: sum(sizes) + 3})
        await sending
        assert (kind, bytes(received)) == (FrameKind.PART, b"".join(payloads) + b"end")
        assert wire.stream.sent_bytes == other.received_bytes == HEADER_BYTES + sum(sizes) + 3

    with_wire(test)


def test_one_of_several_awaited_kinds_is_told_by_its_kind() -> None:
    async def test(wire: Wire) -> None:
        expected = {FrameKind.AVERAGE: 4, FrameKind.WAITING: 0}
        wire.put(FrameKind.WAITING, 0)
        wire.put(FrameKind.AVERAGE, 4, b"abcd")
        assert await wire.stream.receive(expected) == (FrameKind.WAITING, bytearray())
        assert await wire.stream.receive(expected) == (FrameKind.AVERAGE, bytearray(b"abcd"))

    with_wire(test)


def test_frames_of_several_senders_on_one_stream_do_not_mix() -> None:
    async def test(wire: Wire) -> None:
        other = Stream(wire.reader, wire.writer, timeout_s=5.0)
        payloads = [bytes([number]) * 200_000 for number in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for payload in payloads:
                tasks.create_task(wire.stream.send(FrameKind.PART, payload))
            received = [bytes((await other.receive({FrameKind.PART: 200_000}))[1]) for _ in payloads]
        assert sorted(received) == payloads

    with_wire(test)


# --- what should not arrive ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 1, 3, 4, 6, 77, 255])
def test_another_kind_is_out_of_turn(kind: int) -> None:
    assert error_of(kind, 10, bytes(10)) == f"sent a frame of kind {kind} out of turn"


@pytest.mark.parametrize("length", [0, 9, 11, 2**32 - 1])
def test_another_size_names_both_sizes(length: int) -> None:
    assert error_of(FrameKind.PART, length, bytes(min(length, 10))) == f"sent {length} bytes where 10 were due"


@pytest.mark.parametrize("kind", [FrameKind.PART, FrameKind.REFUSED, 99])
def test_a_huge_claimed_length_allocates_nothing(kind: int) -> None:
    async def test(wire: Wire) -> None:
        wire.put(kind, 2**32 - 1)
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                await wire.stream.receive(PART)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()

    with_wire(test)


@given(st.binary(min_size=HEADER_BYTES, max_size=60))
def test_junk_is_one_line_never_another_error(junk: bytes) -> None:
    async def test(wire: Wire) -> None:
        wire.writer.write(junk)
        wire.writer.write_eof()
        try:
            received.append(await wire.stream.receive(PART))
        except WireError as error:
            reasons.append(str(error))

    received, reasons = list[tuple[FrameKind, bytearray]](), list[str]()
    with_wire(test)
    assert all(kind == FrameKind.PART and len(payload) == 10 for kind, payload in received)
    assert all(reason.isprintable() for reason in reasons)
    assert len(received) + len(reasons) == 1


@pytest.mark.parametrize("sent", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9])
def test_a_frame_that_is_cut_is_a_lost_connection(sent: int) -> None:
    async def test(wire: Wire) -> None:
        wire.writer.write((struct.pack("<BI", FrameKind.PART, 10) + bytes(10))[:sent])
        wire.writer.write_eof()
        with pytest.raises(WireError, match="connection lost"):
            await wire.stream.receive(PART)
        assert wire.stream.received_bytes == 0

    with_wire(test)


@pytest.mark.parametrize("sent", [0, 3, HEADER_BYTES, HEADER_BYTES + 9])
def test_silence_ends_the_wait_wherever_it_sets_in(sent: int) -> None:
    async def test(wire: Wire) -> None:
        wire.writer.write((struct.pack("<BI", FrameKind.PART, 10) + bytes(10))[:sent])
        started = time.monotonic()
        with pytest.raises(WireError, match=r"sent nothing for 0\.1 s"):
            await wire.stream.receive(PART)
        assert time.monotonic() - started >= SILENCE_S

    with_wire(test, timeout_s=SILENCE_S)


def test_a_slow_transfer_is_no_silence() -> None:
    """Ten pieces of 64 KiB, each within the limit, take longer than the limit together."""

    async def test(wire: Wire) -> None:
        size = 10 * 64 * 1024
        receiving = asyncio.create_task(wire.stream.receive({FrameKind.PART: size}))
        wire.put(FrameKind.PART, size)
        for _ in range(10):
            await asyncio.sleep(0.06)
            wire.writer.write(bytes(size // 10))
        assert len((await receiving)[1]) == size

    started = time.monotonic()
    with_wire(test, timeout_s=0.5)
    assert time.monotonic() - started > 0.5


# --- sending -------------------------------------------------------------------------------------------


def stop_reading(wire: Wire) -> None:
    transport = wire.writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()


def test_a_receiver_that_takes_nothing_ends_the_send() -> None:
    async def test(wire: Wire) -> None:
        stop_reading(wire)
        started = time.monotonic()
        with pytest.raises(WireError, match=r"took no data for 0\.1 s"):
            await wire.stream.send(FrameKind.PART, bytes(20_000_000))
        assert time.monotonic() - started >= SILENCE_S
        assert wire.stream.sent_bytes == 0

    with_wire(test, timeout_s=SILENCE_S)


async def send_until_it_fails(stream: Stream) -> None:
    """The first bytes may still fit into buffers."""
    while True:
        await stream.send(FrameKind.PART, bytes(100_000))


def test_sending_to_a_side_that_is_gone_is_a_lost_connection() -> None:
    async def test(wire: Wire) -> None:
        wire.writer.transport.abort()
        with pytest.raises(WireError, match="connection lost"):
            await send_until_it_fails(wire.stream)

    with_wire(test)


def test_closing_ends_the_other_sides_wait() -> None:
    async def test(wire: Wire) -> None:
        other = Stream(wire.reader, wire.writer, timeout_s=5.0)
        waiting = asyncio.create_task(other.receive(PART))
        wire.stream.close()
        with pytest.raises(WireError, match="connection lost"):
            await waiting

    with_wire(test)


# --- refusals ------------------------------------------------------------------------------------------


async def refusal(wire: Wire, reason: str) -> str:
    """What one side reads when the other refuses and waits for it to hang up."""
    refusing = asyncio.create_task(Stream(wire.reader, wire.writer, timeout_s=5.0).refuse(reason))
    with pytest.raises(WireError) as caught:
        await wire.stream.receive(PART)
    wire.stream.close()
    await refusing
    return str(caught.value)


@pytest.mark.parametrize("reason", ["", "not a member of this group", "zu groß: ÄÖÜ ✓", "x" * MAX_REASON_BYTES])
def test_a_refusal_arrives_with_its_reason(reason: str) -> None:
    async def test(wire: Wire) -> None:
        assert await refusal(wire, reason) == f"refused: {reason}"

    with_wire(test)


def test_a_long_reason_is_cut_not_rejected() -> None:
    async def test(wire: Wire) -> None:
        assert (await refusal(wire, "ü" * 2000)).startswith("refused: üüü")

    with_wire(test)


def test_a_refusal_arrives_although_the_refused_side_still_sends() -> None:
    """Closing at once would break the connection, and the reason would be lost with it."""

    async def test(wire: Wire) -> None:
        sending = asyncio.create_task(wire.stream.send(FrameKind.PART, bytes(5_000_000)))
        assert await refusal(wire, "too much") == "refused: too much"
        await asyncio.gather(sending, return_exceptions=True)

    with_wire(test)


def test_a_side_that_never_hangs_up_does_not_hold_a_refusal() -> None:
    async def test(wire: Wire) -> None:
        started = time.monotonic()
        await Stream(wire.reader, wire.writer, timeout_s=5.0).refuse("why")
        assert time.monotonic() - started < 4.0

    with_wire(test)


@pytest.mark.parametrize("payload", [b"\xff\xfe", b"\xc3", b"\x00\x01", bytes(range(128, 256))])
def test_a_reason_that_is_no_text_is_still_a_refusal(payload: bytes) -> None:
    assert error_of(FrameKind.REFUSED, len(payload), payload).startswith("refused: ")


@pytest.mark.parametrize("payload", [b"a\nb", b"a\r\nround 1 | commit", b"\x1b[2Jgone", b"\x07\x00", "\u2028".encode()])
def test_a_reason_cannot_write_lines_or_control_a_terminal(payload: bytes) -> None:
    assert error_of(FrameKind.REFUSED, len(payload), payload).isprintable()


def test_an_error_of_several_lines_is_one_line() -> None:
    error = WireError("cannot be reached (failed to dial:\n  * [/ip4/127.0.0.1/tcp/1] refused\n\t* timeout)")
    assert str(error) == "cannot be reached (failed to dial: * [/ip4/127.0.0.1/tcp/1] refused * timeout)"


def test_a_reason_that_is_too_long_is_not_read() -> None:
    length = MAX_REASON_BYTES + 1
    assert error_of(FrameKind.REFUSED, length, bytes(length)) == f"sent a frame of kind {FrameKind.REFUSED} out of turn"


def test_refusing_a_side_that_is_gone_or_takes_nothing_is_no_error() -> None:
    async def gone(wire: Wire) -> None:
        wire.writer.transport.abort()
        await wire.stream.refuse("why")

    async def stuck(wire: Wire) -> None:
        stop_reading(wire)
        with pytest.raises(WireError, match="took no data"):
            await wire.stream.send(FrameKind.PART, bytes(20_000_000))
        await wire.stream.refuse("why")

    with_wire(gone)
    with_wire(stuck, timeout_s=SILENCE_S)
