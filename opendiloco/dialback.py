"""Whether a peer can be reached from outside, asked from another one that dials it anew.

libp2p answers over the connection that the newcomer itself has opened, which a router lets through: that says nothing.
So the other peer opens a TCP connection of its own, to the address that it sees the asker at and to no other, and waits
for the words with which every libp2p listener begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Annotated, Literal

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opendiloco.wire import FrameKind, Stream, WireError

STREAM_NAME = "opendiloco.dialback"
DIAL_S = 3.0
SILENCE_S = 2 * DIAL_S
MAX_PORTS = 4
MAX_MESSAGE_BYTES = 256
MAX_DIALS = 8
"""At once, for all who ask."""
GREETING = b"\x13/multistream/1.0.0\n"
"""https://github.com/multiformats/multistream-select"""

logger = logging.getLogger(__name__)


class Question(BaseModel):
    """Is one of these TCP ports of mine open?"""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    ports: Annotated[list[Annotated[int, Field(ge=1, le=65535)]], Field(min_length=1, max_length=MAX_PORTS)]


class Answer(BaseModel):
    """Whether a libp2p listener has answered there."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    reached: Literal["yes", "no", "busy"]


class Dialback:
    """Answers other peers' questions."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p, self._dials = p2p, 0

    async def open(self) -> None:
        """Begin to answer."""
        await self._p2p.add_binary_stream_handler(STREAM_NAME, self._serve)

    async def _serve(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer, timeout_s=SILENCE_S)
        try:
            asked = await stream.receive_text(FrameKind.REQUEST, max_bytes=MAX_MESSAGE_BYTES)
            answer = await self._answer(Question.model_validate_json(asked), info.addr)
            await stream.send(FrameKind.HEADER, answer.model_dump_json().encode())
        except ValidationError:
            await stream.refuse("a malformed question")
        except WireError as error:
            logger.debug("dialback of %s: %s", info.peer_id, error)
        finally:
            stream.close()

    async def _answer(self, question: Question, seen_at: Multiaddr) -> Answer:
        host = _host_of(seen_at)
        if host is None or self._dials + len(question.ports) > MAX_DIALS:
            return Answer(reached="busy")
        self._dials += len(question.ports)
        try:
            found = await asyncio.gather(*(_is_libp2p(host, port) for port in question.ports))
        finally:
            self._dials -= len(question.ports)
        return Answer(reached="yes" if any(found) else "no")


async def ask(stream: Stream, addresses: Iterable[Multiaddr]) -> bool | None:
    """Whether the peer at the other end reaches this one at a port of `addresses`; None: that is not known."""
    ports = sorted({int(address["tcp"]) for address in addresses if _has_port(address)})[:MAX_PORTS]
    if not ports:
        return None
    try:
        await stream.send(FrameKind.REQUEST, Question(ports=ports).model_dump_json().encode())
        answer = Answer.model_validate_json(await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_MESSAGE_BYTES))
    except (WireError, ValidationError):
        return None
    finally:
        stream.close()
    return None if answer.reached == "busy" else answer.reached == "yes"


async def _is_libp2p(host: str, port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.close()
    return False


def _host_of(address: Multiaddr) -> str | None:
    """The IP address of a connection's other end."""
    for protocol in ("ip4", "ip6"):
        with contextlib.suppress(KeyError, ValueError):
            return str(address[protocol])
    return None


def _has_port(address: Multiaddr) -> bool:
    with contextlib.suppress(KeyError, ValueError):
        return bool(address["tcp"])
    return False
