"""Frames on a libp2p stream: a kind, a length that is checked before anything is read, a payload.

hivemind's protobuf streams copy every message several times and move about 145 MB/s here; the same daemon moves
350-580 MB/s over its raw streams, which is why the all-reduce speaks on those.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from enum import IntEnum

from opendiloco.errors import one_line

_HEADER = struct.Struct("<BI")
_CHUNK_BYTES = 64 * 1024
MAX_REASON_BYTES = 512
LINGER_S = 1.0


class FrameKind(IntEnum):
    """What a frame carries."""

    GROUP = 1
    """Sender to reducer, first: the group's id."""
    PART = 2
    """Sender to reducer: encoded values of one part."""
    AVERAGE = 3
    """Reducer to sender: the encoded average of one part, then who is in it (a bit per member)."""
    WAITING = 4
    """Reducer to sender: alive, but still waiting for others' values. Donor to asker: alive, but in an all-reduce."""
    RECEIVED = 5
    """Sender to reducer: one more average has arrived. Only then may the reducer close the stream: one that is closed
    while data is on its way loses the end of it."""
    ARRIVED = 6
    """Reducer to sender: one more part of its values is there. The sender cannot tell: buffers on the way take it at
    once."""
    REQUEST = 7
    """Asker to donor: what is wanted (JSON)."""
    HEADER = 8
    """Donor to asker: what follows (JSON)."""
    DATA = 9
    """Donor to asker: the bytes that the header describes."""
    REFUSED = 10
    """Either way, last: why the other side stops (text)."""


class WireError(Exception):
    """The other side broke the protocol, refused, or went silent. The message is its reason, on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))  # it may be another peer's words, or libp2p's, which has several lines


class Stream:
    """Frames over one bidirectional byte stream; counts what it moves. `timeout_s` bounds silence, not transfers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, timeout_s: float) -> None:
        self._reader, self._writer, self.timeout_s = reader, writer, timeout_s
        self.sent_bytes = 0
        self.received_bytes = 0
        self._sending = asyncio.Lock()

    async def send(self, kind: FrameKind, *payloads: bytes | memoryview) -> None:
        """Write one frame and wait until most of it has left this process. Several tasks may send on one stream.

        Raises:
            WireError: the other side takes nothing for `timeout_s` seconds, or is gone.
        """
        length = sum(len(payload) for payload in payloads)
        async with self._sending:
            await self._write(_HEADER.pack(kind, length))
            for payload in payloads:
                for start in range(0, len(payload), _CHUNK_BYTES):
                    await self._write(payload[start : start + _CHUNK_BYTES])
        self.sent_bytes += _HEADER.size + length

    async def receive(self, expected: dict[FrameKind, int]) -> tuple[FrameKind, bytearray]:
        """Read one frame of a kind in `expected`, whose exact payload size in bytes is given there.

        Raises:
            WireError: another kind or size, a refusal, `timeout_s` seconds of silence, or the end of the stream.
        """
        kind, length = _HEADER.unpack(await self._read(_HEADER.size))
        if kind == FrameKind.REFUSED and length <= MAX_REASON_BYTES:
            raise WireError(f"refused: {(await self._read(length)).decode(errors='replace')}")
        if kind not in expected:
            raise WireError(f"sent a frame of kind {kind} out of turn")
        if length != expected[FrameKind(kind)]:
            raise WireError(f"sent {length} bytes where {expected[FrameKind(kind)]} were due")
        payload = await self._read(length)
        self.received_bytes += _HEADER.size + length
        return FrameKind(kind), payload

    async def receive_text(self, kind: FrameKind, *, max_bytes: int, patience_s: float = 0.0) -> bytes:
        """Read one frame of that kind, of any size up to `max_bytes`.

        Args:
            patience_s: for how long the other side may say that it makes this one wait.

        Raises:
            WireError: as `receive`.
        """
        give_up = time.monotonic() + patience_s
        found, length = _HEADER.unpack(await self._read(_HEADER.size))
        while (found, length) == (FrameKind.WAITING, 0) and time.monotonic() < give_up:
            found, length = _HEADER.unpack(await self._read(_HEADER.size))
        if found == FrameKind.REFUSED and length <= MAX_REASON_BYTES:
            raise WireError(f"refused: {(await self._read(length)).decode(errors='replace')}")
        if found != kind or length > max_bytes:
            raise WireError(f"sent a frame of kind {found} with {length} bytes out of turn")
        self.received_bytes += _HEADER.size + length
        return bytes(await self._read(length))

    async def refuse(self, reason: str) -> None:
        """Say why this side stops, and let the other hang up first: a stream closed on unread data loses its end."""
        with contextlib.suppress(WireError):
            await self.send(FrameKind.REFUSED, reason.encode()[:MAX_REASON_BYTES])
            await self.linger()

    async def linger(self) -> None:
        """Read, for a moment at most, what the other side still has on its way, until it hangs up."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_S):
                while await self._reader.read(_CHUNK_BYTES):
                    pass

    def close(self) -> None:
        """Let go of the stream; the other side reads its end."""
        self._writer.close()

    async def _write(self, data: bytes | memoryview) -> None:
        try:
            self._writer.write(data)
            async with asyncio.timeout(self.timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise WireError(f"took no data for {self.timeout_s:g} s") from None
        except (OSError, RuntimeError) as error:
            raise WireError(f"connection lost ({error or type(error).__name__})") from None

    async def _read(self, length: int) -> bytearray:
        data, read = bytearray(length), 0
        while read < length:
            try:
                async with asyncio.timeout(self.timeout_s):
                    piece = await self._reader.read(min(_CHUNK_BYTES, length - read))
            except TimeoutError:
                raise WireError(f"sent nothing for {self.timeout_s:g} s") from None
            except OSError:
                raise WireError("connection lost") from None
            if not piece:
                raise WireError("connection lost")
            data[read : read + len(piece)] = piece
            read += len(piece)
        return data
