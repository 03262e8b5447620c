"""Whether a peer can be reached from outside, asked from another one that dials it anew.

libp2p answers over the connection that the newcomer itself has opened, which a router lets through: that says nothing.
So the other peer opens a TCP connection of its own to the addresses that the newcomer announces, as everybody will who
wants something of it, and waits for the words with which every libp2p listener begins.

Nobody can make it dial a third party: it dials the address that it sees the newcomer at, and private ones only while
that one is private, too, so that the newcomer is in the same network anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from opendiloco.wire import FrameKind, Stream, WireError

STREAM_NAME = "opendiloco.dialback"
DIAL_S = 3.0
SILENCE_S = 2 * DIAL_S
MAX_PLACES = 4
MAX_MESSAGE_BYTES = 1024
MAX_DIALS = 8
"""At once, for all who ask."""
NAME_PROTOCOLS = ("dns4", "dns6", "dns")
GREETING = b"\x13/multistream/1.0.0\n"
"""https://github.com/multiformats/multistream-select"""
PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"))
)
"""RFC 1918, RFC 6598, RFC 4193. Not 169.254.0.0/16, where clouds tell a machine its secrets."""
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

logger = logging.getLogger(__name__)


def _plain(ip: Ip) -> Ip:
    """IPv4 where it is written as IPv6."""
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


class Place(BaseModel):
    """Where a peer says that it listens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[Ip, AfterValidator(_plain)]
    port: Annotated[int, Field(ge=1, le=65535)]


class Question(BaseModel):
    """Does anybody answer at one of these places?"""

    model_config = ConfigDict(frozen=True, extra="forbid")

    places: Annotated[list[Place], Field(min_length=1, max_length=MAX_PLACES)]


class Answer(BaseModel):
    """Whether a libp2p listener has answered at one; unknown: not all of them could be tried."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    reached: Literal["yes", "no", "unknown"]


class Dialback:
    """Answers other peers' questions, one of each at a time."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p, self._dials, self._askers = p2p, 0, set[str]()

    async def open(self) -> None:
        """Begin to answer."""
        await self._p2p.add_binary_stream_handler(STREAM_NAME, self._serve)

    async def _serve(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream, asker = Stream(reader, writer, timeout_s=SILENCE_S), str(info.peer_id)
        is_first = asker not in self._askers
        self._askers.add(asker)
        try:
            asked = await stream.receive_text(FrameKind.REQUEST, max_bytes=MAX_MESSAGE_BYTES)
            places = Question.model_validate_json(asked).places
            own = set(map(_place_of, await self._p2p.get_visible_maddrs()))
            seen_at = _ip_of(info.addr) if is_first else None
            answer = await self._answer(judge(places, own, seen_at))
            await stream.send(FrameKind.HEADER, answer.model_dump_json().encode())
        except ValidationError:
            await stream.refuse("a malformed question")
        except WireError as error:
            logger.debug("dialback of %s: %s", info.peer_id, error)
        finally:
            if is_first:
                self._askers.discard(asker)
            stream.close()

    async def _answer(self, looked_at: Judged) -> Answer:
        found = await asyncio.gather(*map(self._dial, looked_at.tried))
        if True in found:
            return Answer(reached="yes")
        return Answer(reached="unknown" if looked_at.left_out or None in found else "no")

    async def _dial(self, place: Place) -> bool | None:
        """Whether a libp2p listener greets there; None: too much else to do."""
        if self._dials >= MAX_DIALS:
            return None
        self._dials += 1
        try:
            async with asyncio.timeout(DIAL_S):
                reader, writer = await asyncio.open_connection(str(place.host), place.port)
                try:
                    return await reader.readexactly(len(GREETING)) == GREETING
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            return False
        finally:
            self._dials -= 1


@dataclass(frozen=True)
class Judged:
    """Places that a newcomer announces, as the peer that it asks sees them."""

    tried: list[Place]
    left_out: list[Place]
    """They may be the newcomer's, and cannot be dialled from here. All others are nothing from here for certain."""


def judge(places: Iterable[Place], own: Collection[Place | None], seen_at: Ip | None) -> Judged:
    """Which places can be dialled.

    Args:
        own: where the peer that is asked listens itself, which says nothing of the newcomer.
        seen_at: from where the newcomer's connection comes; None: that is not known.
    """
    judged = Judged([], [])
    is_here = seen_at is not None and seen_at.is_loopback
    is_near = seen_at is not None and (is_here or _is_private(seen_at))
    for place in places:
        host = place.host
        if seen_at is None or place in own:
            judged.left_out.append(place)
        elif host == seen_at or (is_near and _is_private(host)) or (is_here and host.is_loopback):
            judged.tried.append(place)
        elif host.is_global:
            judged.left_out.append(place)
    return judged


async def ask(stream: Stream, addresses: Iterable[Multiaddr]) -> bool | None:
    """Whether the peer at the other end reaches this one at one of `addresses`; None: that is not known."""
    try:
        places = dict.fromkeys([place for address in addresses for place in await _places(address)])
        if not places:
            return None
        from_far = sorted(places, key=lambda place: (place.host.is_loopback, _is_private(place.host)))
        question = Question(places=from_far[:MAX_PLACES])
        await stream.send(FrameKind.REQUEST, question.model_dump_json().encode())
        answer = Answer.model_validate_json(await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_MESSAGE_BYTES))
    except (WireError, ValidationError):
        return None
    finally:
        stream.close()
    return None if answer.reached == "unknown" else answer.reached == "yes"


async def _places(address: Multiaddr) -> list[Place]:
    """What an address comes to, whose host may be a name."""
    for protocol in NAME_PROTOCOLS:
        with contextlib.suppress(LookupError, ValueError, OSError, TimeoutError):
            name, port = str(address[protocol]), int(address["tcp"])
            async with asyncio.timeout(DIAL_S):
                found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
            return [Place(host=_plain(ipaddress.ip_address(where[0])), port=port) for *_, where in found]
    place = _place_of(address)
    return [place] if place is not None else []


def _place_of(address: Multiaddr) -> Place | None:
    ip = _ip_of(address)
    with contextlib.suppress(LookupError, ValueError):
        return Place(host=ip, port=int(address["tcp"])) if ip is not None else None
    return None


def _ip_of(address: Multiaddr) -> Ip | None:
    """The peer's own, not that of a relay before it."""
    if "/p2p-circuit" in str(address):
        return None
    for protocol in ("ip4", "ip6"):
        with contextlib.suppress(LookupError, ValueError):
            return _plain(ipaddress.ip_address(str(address[protocol])))
    return None


def _is_private(ip: Ip) -> bool:
    return any(ip in network for network in PRIVATE if network.version == ip.version)
