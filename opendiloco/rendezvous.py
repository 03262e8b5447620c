"""Gathering the group of a round: one leader, chosen by hash, starts it the moment the last live peer is there.

A peer that is done with its inner phase asks the round's leader to be let in and is told about the group on the same
call. The leader's network process gathers even while its own trainer still trains. Peers go to one leader at a time
and a group needs a quorum, so at most one group of a round can start. hivemind's own matchmaking is not used: it
knows nothing of rounds, waits a fixed time unless the group size is known in advance, and can start two groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import AsyncIterator  # noqa: UP035 - hivemind's handlers know only this one

import msgpack
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from pydantic import ValidationError

from opendiloco.allreduce import Group
from opendiloco.connect import TRANSPORT_ERRORS
from opendiloco.ledger import Reading
from opendiloco.lobby import MAX_MEMBERS, Lobby, Offer, Outlook, Place, Rules, Start, group_of
from opendiloco.rounds import leader_order

NAMESPACE = "opendiloco"
KEEPALIVE_S = 1.0
RETRY_S = 0.1
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 16.0  # before a leader that could not be reached is tried again

_Code = averaging_pb2.MessageCode
_Message = averaging_pb2.MessageFromLeader


@dataclass(frozen=True)
class RoundCall:
    """What this peer brings to the round of group key `key`."""

    key: str
    weight: float
    tokens: int
    readings: tuple[Reading, ...]
    bandwidth: float | None
    """Bytes per second; 0: reduces nothing; None: not measured yet."""
    gone: frozenset[str] = frozenset()
    """Peers that dropped out of an earlier attempt."""
    last_group: bytes = b""
    """Id of the group of the earlier attempt."""


@dataclass(frozen=True)
class Assembly:
    """A group that has started, and how long this peer waited in it for the last one to arrive."""

    group: Group
    wait_s: float


@dataclass
class _Unreachable:
    """Leaders of one round that could not be reached. Each is tried again after a pause, which doubles every time.

    For ever would be too long: two peers of which one missed the other once would both lead, and wait for each other.
    """

    key: str
    _until: dict[str, float] = field(default_factory=dict)
    _pause_s: dict[str, float] = field(default_factory=dict)

    def add(self, peer: str) -> None:
        pause_s = self._pause_s[peer] = min(MAX_PAUSE_S, 2 * self._pause_s.get(peer, FIRST_PAUSE_S / 2))
        self._until[peer] = time.monotonic() + pause_s

    def discard(self, peer: str) -> None:
        self._until.pop(peer, None)

    def peers(self) -> frozenset[str]:
        return frozenset(peer for peer in self._until if peer in self)

    def __contains__(self, peer: str) -> bool:
        return self._until.get(peer, 0.0) > time.monotonic()


class Rendezvous(ServicerBase):  # type: ignore[misc]
    """Lets peers into the group of the current round, and gets this peer into it."""

    def __init__(
        self,
        p2p: P2P,
        rules: Rules,
        *,
        outlook: Callable[[], Outlook],
        refresh: Callable[[], Awaitable[None]],
        is_alive: Callable[[PeerID], Awaitable[bool]],
        silence_s: float,
    ) -> None:
        """Args: `outlook` reads membership's view, `refresh` renews it, `silence_s` marks a peer as gone."""
        self._p2p, self._peer, self._rules = p2p, str(p2p.peer_id), rules
        self._outlook, self._refresh, self._is_alive = outlook, refresh, is_alive
        self._silence_s = silence_s
        self._lobby: Lobby | None = None
        self._unreachable = _Unreachable("")

    async def open(self) -> None:
        """Begin to answer other peers."""
        await self.add_p2p_handlers(self._p2p, namespace=NAMESPACE)

    # --- getting into a group ----------------------------------------------------------------------------

    async def gather(self, call: RoundCall) -> Assembly:
        """Arrive at the round and return its group; waits for a quorum as long as it takes.

        The caller bounds or cancels the wait. Peers that leave or whose records expire stop counting meanwhile.
        """
        suggested: str | None = None
        for peer in call.gone:
            self._unreachable_in(call.key).add(peer)  # whoever drops out of groups had better not lead the next one
        while True:
            unreachable = self._unreachable_in(call.key)
            leader = suggested if suggested and suggested not in unreachable else self._leader(call.key)
            gone = sorted(call.gone | unreachable.peers())[:MAX_MEMBERS]
            offer = Offer(
                weight=call.weight,
                tokens=call.tokens,
                readings=list(call.readings),
                bandwidth=call.bandwidth,
                gone=gone,
                last_group=call.last_group,
            )
            if leader == self._peer:
                found = await self._lead(call.key, offer)
            else:
                found = await self._follow(leader, call.key, offer)
            if isinstance(found, Assembly):
                return found
            suggested = found
            await asyncio.sleep(RETRY_S)
            await self._refresh()

    async def _lead(self, key: str, offer: Offer) -> Assembly | str | None:
        """Take part as the leader; returns the better leader when membership comes to see one."""
        lobby = self._lobby_of(key)
        lobby.enter(self._peer, offer)
        try:
            while not lobby.started.done():
                if (leader := self._leader(key)) != self._peer:
                    return leader
                await asyncio.wait({lobby.started}, timeout=RETRY_S)
            start = lobby.started.result()
            if start is None or self._peer not in start.places:
                return None
            return Assembly(start.group, start.places[self._peer].wait_s)
        finally:
            lobby.leave(self._peer)

    async def _follow(self, leader: str, key: str, offer: Offer) -> Assembly | str | None:
        """Ask `leader` in; returns another peer to ask, or None, when it does not lead to a group."""
        request = averaging_pb2.JoinRequest(group_key=key, gather=msgpack.packb(offer.model_dump()))
        arrived = time.monotonic()
        try:
            async with asyncio.timeout(self._silence_s):
                stub = self.get_stub(self._p2p, PeerID.from_base58(leader), namespace=NAMESPACE)
                messages = await stub.rpc_join_group(request)
            async with contextlib.aclosing(messages):
                while True:
                    async with asyncio.timeout(self._silence_s):
                        message = await anext(messages)
                    if message.code == _Code.ACCEPTED:
                        continue
                    if message.code == _Code.BEGIN_ALLREDUCE:
                        return self._read_group(message, waited_s=time.monotonic() - arrived)
                    if message.code == _Code.NOT_A_LEADER and message.suggested_leader:
                        suggested = str(PeerID(message.suggested_leader))
                        self._unreachable_in(key).discard(suggested)  # the peer that suggests it has just tried it
                        return suggested
                    return None  # not at this round (yet), or its group was given up
        except StopAsyncIteration:  # an answer that got lost
            return None
        except (*TRANSPORT_ERRORS, ValueError, TypeError):
            self._unreachable_in(key).add(leader)
            return None

    def _read_group(self, message: averaging_pb2.MessageFromLeader, *, waited_s: float) -> Assembly:
        """Check the leader's word; raises ValueError when it makes no sense."""
        peers = [str(PeerID(peer)) for peer in message.ordered_peer_ids]
        if len(peers) > MAX_MEMBERS or len(peers) != len(message.gathered) or len(message.group_id) != 16:
            raise ValueError("the group is malformed")
        places = [Place.model_validate(msgpack.unpackb(place)) for place in message.gathered]
        if self._peer not in peers or peers != sorted(set(peers)) or not any(place.share for place in places):
            raise ValueError("the group is malformed")
        group = group_of(message.group_id, dict(zip(peers, places, strict=True)))
        return Assembly(group, min(places[peers.index(self._peer)].wait_s, waited_s))

    # --- leading -----------------------------------------------------------------------------------------

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """A peer that is done with its inner phase asks to be let into the group of `request.group_key`."""
        async with contextlib.aclosing(self._answer(request, str(context.remote_id))) as messages:
            async for message in messages:
                yield message
        # The caller hangs up when it has read the last message; a stream that ends here first loses it now and then.
        await asyncio.sleep(self._silence_s)

    async def _answer(
        self, request: averaging_pb2.JoinRequest, peer: str
    ) -> AsyncGenerator[averaging_pb2.MessageFromLeader, None]:
        key = request.group_key
        try:
            offer = Offer.model_validate(msgpack.unpackb(request.gather))
        except (ValidationError, ValueError, TypeError, msgpack.UnpackException):
            yield _Message(code=_Code.PROTOCOL_VIOLATION)
            return
        if key != self._outlook().key:
            yield _Message(code=_Code.BAD_GROUP_KEY)
            return
        if (start := self._missed_start(key, peer, offer)) is not None:
            yield _word(start, peer)
            return
        checking = asyncio.create_task(self._reachable_leader(key, offer.gone))
        try:
            while not checking.done() and self._leader(key) != self._peer:
                yield _Message(code=_Code.ACCEPTED)  # or the caller would take this peer for gone meanwhile
                await asyncio.wait({checking}, timeout=RETRY_S)
            leader = checking.result() if checking.done() else self._peer
        finally:
            checking.cancel()
        if leader != self._peer:
            yield _Message(code=_Code.NOT_A_LEADER, suggested_leader=PeerID.from_base58(leader).to_bytes())
            return
        lobby = self._lobby_of(key)
        lobby.enter(peer, offer)
        try:
            while not lobby.started.done() and self._leader(key) == self._peer:
                yield _Message(code=_Code.ACCEPTED)
                await asyncio.wait({lobby.started}, timeout=KEEPALIVE_S)
            yield _word(lobby.started.result() if lobby.started.done() else None, peer)
        finally:
            lobby.leave(peer)

    def _missed_start(self, key: str, peer: str, offer: Offer) -> Start | None:
        """The group that has started with this peer, if the word of it has not reached it."""
        lobby = self._lobby
        if lobby is None or lobby.key != key or not lobby.started.done():
            return None
        start = lobby.started.result()
        missed = start is not None and peer in start.places and offer.last_group != start.group.id
        return start if missed else None

    def _lobby_of(self, key: str) -> Lobby:
        """The open lobby of that round; the caller enters it before anything else runs."""
        if self._lobby is None or self._lobby.key != key or self._lobby.started.done():
            self._lobby = lobby = Lobby(key)
            loop = asyncio.get_running_loop()
            self._running = loop.create_task(lobby.run(self._rules, self._outlook, self._refresh))
        return self._lobby

    def _leader(self, key: str) -> str:
        able = [peer for peer, candidate in self._outlook().candidates.items() if candidate.can_lead]
        unreachable = self._unreachable_in(key)
        order = [peer for peer in leader_order(key, able) if peer not in unreachable]
        return order[0] if order else self._peer

    async def _reachable_leader(self, key: str, doubted: Collection[str]) -> str:
        """The round's leader; one that the asking peer could not reach is tried from here first."""
        while (leader := self._leader(key)) != self._peer and leader in doubted:
            if await self._is_alive(PeerID.from_base58(leader)):
                return leader
            self._unreachable_in(key).add(leader)
        return leader

    def _unreachable_in(self, key: str) -> _Unreachable:
        if key != self._unreachable.key:
            self._unreachable = _Unreachable(key)
        return self._unreachable


def _word(start: Start | None, peer: str) -> averaging_pb2.MessageFromLeader:
    """The leader's last message to a follower."""
    if start is None or peer not in start.places:
        return _Message(code=_Code.GROUP_DISBANDED)
    return _Message(
        code=_Code.BEGIN_ALLREDUCE,
        group_id=start.group.id,
        ordered_peer_ids=[PeerID.from_base58(member).to_bytes() for member in start.group.peers],
        gathered=[msgpack.packb(start.places[member].model_dump()) for member in start.group.peers],
    )
