"""Whether a peer can be reached from outside, asked from another one that dials it anew.

libp2p answers over the connection that the newcomer itself has opened, which a router lets through: that says nothing.
So the other peer opens a TCP connection of its own to the addresses that the newcomer announces, as everybody will who
wants something of it, and waits for the words with which every libp2p listener begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
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
MAX_PLACES = 4
MAX_MESSAGE_BYTES = 1024
MAX_DIALS = 8
"""At once, for all who ask."""
GREETING = b"\x13/multistream/1.0.0\n"
"""https://github.com/multiformats/multistream-select"""
HOST_PROTOCOLS = ("ip4", "ip6", "dns4", "dns6", "dns")

logger = logging.getLogger(__name__)


class Place(BaseModel):
    """Where a peer says that it listens."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    host: Annotated[str, Field(pattern=r"^[0-9A-Za-z.:-]{1,100}$")]
    port: Annotated[int, Field(ge=1, le=65535)]


class Question(BaseModel):
    """Does anybody answer at one of these places?"""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    places: Annotated[list[Place], Field(min_length=1, max_length=MAX_PLACES)]


class Answer(BaseModel):
    """Whether a libp2p listener has answered at one."""

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
            answer = await self._answer(Question.model_validate_json(asked), seen_at=_host_of(info.addr))
            await stream.send(FrameKind.HEADER, answer.model_dump_json().encode())
        except ValidationError:
            await stream.refuse("a malformed question")
        except WireError as error:
            logger.debug("dialback of %s: %s", info.peer_id, error)
        finally:
            stream.close()

    async def _answer(self, question: Question, *, seen_at: str | None) -> Answer:
        # this machine's own loopback is the asker's only if the asker is here
        is_here = seen_at is not None and _is_loopback(seen_at)
        places = [place for place in question.places if is_here or not _is_loopback(place.host)]
        if self._dials + len(places) > MAX_DIALS:
            return Answer(reached="busy")
        self._dials += len(places)
        try:
            found = await asyncio.gather(*map(_is_libp2p, places))
        finally:
            self._dials -= len(places)
        return Answer(reached="yes" if any(found) else "no")


async def ask(stream: Stream, addresses: Iterable[Multiaddr]) -> bool | None:
    """Whether the peer at the other end reaches this one at one of `addresses`; None: that is not known."""
    places = [place for address in addresses if (place := _place_of(address)) is not None]
    if not places:
        return None
    question = Question(places=sorted(places, key=lambda place: _is_loopback(place.host))[:MAX_PLACES])
    try:
        await stream.send(FrameKind.REQUEST, question.model_dump_json().encode())
        answer = Answer.model_validate_json(await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_MESSAGE_BYTES))
    except (WireError, ValidationError):
        return None
    finally:
        stream.close()
    return None if answer.reached == "busy" else answer.reached == "yes"


async def _is_libp2p(place: Place) -> bool:
    with contextlib.suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(place.host, place.port)
            try:
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.close()
    return False


def _place_of(address: Multiaddr) -> Place | None:
    host = _host_of(address)
    with contextlib.suppress(KeyError, ValueError):
        return Place(host=host, port=int(address["tcp"])) if host is not None else None
    return None


def _host_of(address: Multiaddr) -> str | None:
    for protocol in HOST_PROTOCOLS:
        with contextlib.suppress(KeyError, ValueError):
            return str(address[protocol])
    return None


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
