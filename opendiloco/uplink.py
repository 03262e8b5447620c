"""How fast this machine can send, asked from another peer that counts what comes.

The one that sends cannot know: buffers on the way take megabytes at once. So the other peer counts for some seconds
from the first bytes on and says what came. It does so for one asker at a time, and rests between two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Annotated

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opendiloco.wire import FrameKind, Stream, WireError

STREAM_NAME = "opendiloco.uplink"
COUNT_S = 3.0
"""For which what comes is counted."""
REST_S = 2 * COUNT_S
SILENCE_S = 5.0
PIECE_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 256
BUSY = "counts what somebody else sends, or has just done so"

logger = logging.getLogger(__name__)


class Count(BaseModel):
    """What has come."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    received_bytes: Annotated[int, Field(ge=1, le=2**50)]
    seconds: Annotated[float, Field(ge=COUNT_S, le=1e4)]


class Uplink:
    """Counts what others send who want to know."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p, self._free_at = p2p, 0.0

    async def open(self) -> None:
        """Begin to answer."""
        await self._p2p.add_binary_stream_handler(STREAM_NAME, self._serve)

    async def _serve(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer, timeout_s=SILENCE_S)
        try:
            if time.monotonic() < self._free_at:
                await stream.refuse(BUSY)
                return
            self._free_at = time.monotonic() + SILENCE_S + COUNT_S + REST_S  # at the latest
            async with asyncio.timeout(SILENCE_S + COUNT_S):
                count = await _count(stream)
            await stream.send(FrameKind.HEADER, count.model_dump_json().encode())
            self._free_at = time.monotonic() + REST_S
            await stream.linger()
        except (WireError, TimeoutError) as error:
            logger.debug("uplink of %s: %s", info.peer_id, error)
        finally:
            stream.close()


async def measure(stream: Stream) -> float | None:
    """Bytes per second that the peer at the other end receives from this one; None: it does not say."""
    sending = asyncio.create_task(_send(stream))
    try:
        answer = await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_MESSAGE_BYTES)
        count = Count.model_validate_json(answer)
    except (WireError, ValidationError):
        return None
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, WireError):
            await sending
        stream.close()
    return min(count.received_bytes, stream.sent_bytes + PIECE_BYTES) / count.seconds


async def _send(stream: Stream) -> None:
    piece = bytes(PIECE_BYTES)
    while True:
        await stream.send(FrameKind.DATA, piece)


async def _count(stream: Stream) -> Count:
    """From the end of the first piece on.

    Raises:
        WireError: nothing comes, or something else.
    """
    await stream.receive({FrameKind.DATA: PIECE_BYTES})
    began, received_bytes, seconds = time.monotonic(), 0, 0.0
    while seconds < COUNT_S:
        await stream.receive({FrameKind.DATA: PIECE_BYTES})
        received_bytes, seconds = received_bytes + PIECE_BYTES, time.monotonic() - began
    return Count(received_bytes=received_bytes, seconds=seconds)
