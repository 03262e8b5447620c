"""Gathering the group of a round: one leader, chosen by hash, starts it the moment the last live peer is there.

A peer that is done with its inner phase asks the round's leader to be let in and is told about the group on the same
call. The leader's network process gathers even while its own trainer still trains. Peers go to one leader at a time
and a group needs a quorum, so at most one group of a round can start. hivemind's own matchmaking is not used: it
knows nothing of rounds, waits a fixed time unless the group size is known in advance, and can start two groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, AsyncIterator, Literal  # noqa: UP035 - hivemind's handlers know only this AsyncIterator

import msgpack
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opendiloco.allreduce import Group, Member
from opendiloco.connect import TRANSPORT_ERRORS
from opendiloco.rounds import Gathering, leader_order, reduce_shares, start_time

NAMESPACE = "opendiloco"
KEEPALIVE_S = 1.0
RETRY_S = 0.1
MAX_MEMBERS = 1024

_Code = averaging_pb2.MessageCode

Weight = Annotated[float, Field(gt=0, le=1e15)]
Tokens = Annotated[int, Field(ge=0, le=2**50)]


class _Offer(BaseModel):
    """What an arriving peer brings: sent as `JoinRequest.gather`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    weight: Weight
    tokens: Tokens
    bandwidth: Annotated[float, Field(ge=0, le=1e15)] | None
    """Bytes per second; 0: reduces nothing; None: not measured yet."""
    gone: list[Annotated[str, Field(max_length=128)]] = Field(max_length=MAX_MEMBERS)
    """Peers that dropped out of this round before this peer's eyes."""


class _Place(BaseModel):
    """A member's place in the group: sent as `MessageFromLeader.gathered`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    weight: Weight
    tokens: Tokens
    share: Annotated[float, Field(ge=0, le=1)]
    wait_s: Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class RoundCall:
    """What this peer brings to the round of group key `key`."""

    key: str
    weight: float
    tokens: int
    bandwidth: float | None
    """Bytes per second; 0: reduces nothing; None: not measured yet."""
    gone: frozenset[str] = frozenset()
    """Peers that dropped out of an earlier attempt."""


@dataclass(frozen=True)
class Assembly:
    """A group that has started, and how long this peer waited in it for the last one to arrive."""

    group: Group
    wait_s: float


@dataclass(frozen=True)
class Candidate:
    """A live peer of a round: when it expects to be done (this process's clock), and whether it can lead."""

    expected_finish: float
    can_lead: bool


@dataclass(frozen=True)
class Outlook:
    """The round as membership sees it: the key of the current round, and its live peers, this one included."""

    key: str
    candidates: Mapping[str, Candidate]
    inner_s: float


@dataclass
class _Follower:
    offer: _Offer
    arrived: float


@dataclass
class _Lobby:
    """Who has arrived at this peer for the round `key`."""

    key: str
    followers: dict[str, _Follower] = field(default_factory=dict)
    outcome: asyncio.Future[Assembly | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    places: dict[str, _Place] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Rendezvous(ServicerBase):  # type: ignore[misc]
    """Lets peers into the group of the current round, and gets this peer into it."""

    def __init__(
        self,
        p2p: P2P,
        *,
        outlook: Callable[[], Outlook],
        refresh: Callable[[], Awaitable[None]],
        is_alive: Callable[[PeerID], Awaitable[bool]],
        quorum: float,
        deadline: float | Literal["adaptive"],
        silence_s: float,
    ) -> None:
        """Args: `outlook` reads membership's view, `refresh` renews it, `silence_s` marks a peer as gone."""
        self._p2p, self._peer = p2p, str(p2p.peer_id)
        self._outlook, self._refresh, self._is_alive = outlook, refresh, is_alive
        self._quorum, self._deadline, self._silence_s = quorum, deadline, silence_s
        self._lobby: _Lobby | None = None
        self._unreachable: dict[str, set[str]] = {}  # group key -> peers; of the newest key only

    async def open(self) -> None:
        """Begin to answer other peers."""
        await self.add_p2p_handlers(self._p2p, namespace=NAMESPACE)

    # --- getting into a group ----------------------------------------------------------------------------

    async def gather(self, call: RoundCall) -> Assembly:
        """Arrive at the round and return its group; waits for a quorum as long as it takes.

        The caller bounds or cancels the wait. Peers that leave or whose records expire stop counting meanwhile.
        """
        suggested: str | None = None
        while True:
            unreachable = self._unreachable_in(call.key)
            leader = suggested if suggested and suggested not in unreachable else self._leader(call.key)
            gone = sorted(call.gone | unreachable)
            offer = _Offer(weight=call.weight, tokens=call.tokens, bandwidth=call.bandwidth, gone=gone)
            if leader == self._peer:
                found = await self._lead(call.key, offer)
            else:
                found = await self._follow(leader, call.key, offer)
            if isinstance(found, Assembly):
                return found
            suggested = found
            await asyncio.sleep(RETRY_S)
            await self._refresh()

    def _unreachable_in(self, key: str) -> set[str]:
        if key not in self._unreachable:
            self._unreachable = {key: set()}
        return self._unreachable[key]

    def _leader(self, key: str) -> str:
        able = [peer for peer, candidate in self._outlook().candidates.items() if candidate.can_lead]
        unreachable = self._unreachable_in(key)
        order = [peer for peer in leader_order(key, able) if peer not in unreachable]
        return order[0] if order else self._peer

    async def _follow(self, leader: str, key: str, offer: _Offer) -> Assembly | str | None:
        """Ask `leader` in; returns another peer to ask, or None, when it does not lead to a group."""
        request = averaging_pb2.JoinRequest(
            schema_hash=b"1", group_key=key, gather=msgpack.packb(offer.model_dump()), expiration=time.time()
        )
        started = time.monotonic()
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
                        return self._read_group(message, waited_s=time.monotonic() - started)
                    if message.code == _Code.NOT_A_LEADER and message.suggested_leader:
                        return str(PeerID(message.suggested_leader))
                    return None  # not at this round (yet), or its group was given up
        except (*TRANSPORT_ERRORS, StopAsyncIteration, ValueError):
            self._unreachable_in(key).add(leader)
            return None

    def _read_group(self, message: averaging_pb2.MessageFromLeader, *, waited_s: float) -> Assembly:
        """Check the leader's word; raises ValueError when it makes no sense."""
        peers = [str(PeerID(peer)) for peer in message.ordered_peer_ids]
        if len(peers) > MAX_MEMBERS or len(peers) != len(message.gathered) or len(message.group_id) != 16:
            raise ValueError("the group is malformed")
        places = [_Place.model_validate(msgpack.unpackb(place)) for place in message.gathered]
        if self._peer not in peers or peers != sorted(set(peers)) or not any(place.share for place in places):
            raise ValueError("the group is malformed")
        members = tuple(
            Member(peer, place.weight, place.tokens, place.share) for peer, place in zip(peers, places, strict=True)
        )
        wait_s = min(places[peers.index(self._peer)].wait_s, waited_s)
        return Assembly(Group(message.group_id, members), wait_s)

    # --- leading -----------------------------------------------------------------------------------------

    async def _lead(self, key: str, offer: _Offer) -> Assembly | str | None:
        """Take part as the leader; returns the better leader when membership comes to see one."""
        lobby = self._open_lobby(key)
        lobby.followers[self._peer] = _Follower(offer, time.monotonic())
        lobby.changed.set()
        try:
            while not lobby.outcome.done():
                leader = self._leader(key)
                if leader != self._peer:
                    return leader
                await asyncio.wait({lobby.outcome}, timeout=RETRY_S)
            return lobby.outcome.result()
        finally:
            lobby.followers.pop(self._peer, None)
            lobby.changed.set()

    def _open_lobby(self, key: str) -> _Lobby:
        if self._lobby is None or self._lobby.key != key or self._lobby.outcome.done():
            self._lobby = _Lobby(key)
            self._watching = asyncio.create_task(self._watch(self._lobby))
            self._watching.add_done_callback(partial(_end, self._lobby))
        return self._lobby

    async def _watch(self, lobby: _Lobby) -> None:
        """Start the group of a lobby in time; without one when everybody left it or its round is over."""
        refreshed = time.monotonic()
        while True:
            lobby.changed.clear()
            if not lobby.followers or self._outlook().key != lobby.key:
                return
            now = time.monotonic()
            if now - refreshed > KEEPALIVE_S:
                await self._refresh()
                refreshed = time.monotonic()
            start = start_time(self._gathering(lobby), quorum=self._quorum, deadline=self._deadline)
            if start is not None and start <= now and self._begin(lobby):
                return
            pause_s = KEEPALIVE_S if start is None else min(KEEPALIVE_S, max(start - now, 0.0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await lobby.changed.wait()

    def _gathering(self, lobby: _Lobby) -> Gathering:
        outlook = self._outlook()
        gone = frozenset(peer for follower in lobby.followers.values() for peer in follower.offer.gone)
        expected = {peer: candidate.expected_finish for peer, candidate in outlook.candidates.items()}
        arrived = {peer: follower.arrived for peer, follower in lobby.followers.items()}
        return Gathering(time.monotonic(), arrived, expected, outlook.inner_s, gone)

    def _begin(self, lobby: _Lobby) -> bool:
        """Fix the members; False when nobody among them could reduce."""
        peers = sorted(lobby.followers)
        bandwidths = [lobby.followers[peer].offer.bandwidth for peer in peers]
        if not any(bandwidth != 0 for bandwidth in bandwidths):
            return False
        last = max(follower.arrived for follower in lobby.followers.values())
        for peer, share in zip(peers, reduce_shares(bandwidths), strict=True):
            follower = lobby.followers[peer]
            lobby.places[peer] = _Place(
                weight=follower.offer.weight,
                tokens=follower.offer.tokens,
                share=share,
                wait_s=last - follower.arrived,
            )
        places = lobby.places
        members = tuple(Member(peer, places[peer].weight, places[peer].tokens, places[peer].share) for peer in peers)
        own = places.get(self._peer)
        lobby.outcome.set_result(Assembly(Group(secrets.token_bytes(16), members), own.wait_s if own else 0.0))
        return True

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """A peer that is done with its inner phase asks to be let into the group of `request.group_key`."""
        peer = str(context.remote_id)
        try:
            offer = _Offer.model_validate(msgpack.unpackb(request.gather))
        except (ValidationError, ValueError, TypeError, msgpack.UnpackException):
            yield averaging_pb2.MessageFromLeader(code=_Code.PROTOCOL_VIOLATION)
            return
        if request.group_key != self._outlook().key:
            yield averaging_pb2.MessageFromLeader(code=_Code.BAD_GROUP_KEY)
            return
        leader = await self._reachable_leader(request.group_key, offer.gone)
        if leader != self._peer:
            suggested = PeerID.from_base58(leader).to_bytes()
            yield averaging_pb2.MessageFromLeader(code=_Code.NOT_A_LEADER, suggested_leader=suggested)
            return
        async for message in self._host(peer, request.group_key, offer):
            yield message

    async def _reachable_leader(self, key: str, doubted: Collection[str]) -> str:
        """The round's leader; one that the asking peer could not reach is tried from here first."""
        while (leader := self._leader(key)) != self._peer and leader in doubted:
            if await self._is_alive(PeerID.from_base58(leader)):
                return leader
            self._unreachable_in(key).add(leader)
        return leader

    async def _host(self, peer: str, key: str, offer: _Offer) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        lobby = self._open_lobby(key)
        lobby.followers[peer] = _Follower(offer, time.monotonic())
        lobby.changed.set()
        try:
            while not lobby.outcome.done():
                yield averaging_pb2.MessageFromLeader(code=_Code.ACCEPTED)
                await asyncio.wait({lobby.outcome}, timeout=KEEPALIVE_S)
                if not lobby.outcome.done() and self._leader(key) != self._peer:
                    break
            yield self._word(lobby, peer)
        finally:
            if not lobby.outcome.done():
                lobby.followers.pop(peer, None)
                lobby.changed.set()

    def _word(self, lobby: _Lobby, peer: str) -> averaging_pb2.MessageFromLeader:
        """The leader's last message to a follower."""
        assembly = lobby.outcome.result() if lobby.outcome.done() else None
        if assembly is None or peer not in lobby.places:
            return averaging_pb2.MessageFromLeader(code=_Code.GROUP_DISBANDED)
        return averaging_pb2.MessageFromLeader(
            code=_Code.BEGIN_ALLREDUCE,
            group_id=assembly.group.id,
            ordered_peer_ids=[PeerID.from_base58(member).to_bytes() for member in assembly.group.peers],
            gathered=[msgpack.packb(lobby.places[member].model_dump()) for member in assembly.group.peers],
        )


def _end(lobby: _Lobby, watching: asyncio.Task[None]) -> None:
    """However the watch over a lobby ended, nobody waits in it for ever."""
    if not lobby.outcome.done():
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            lobby.outcome.set_exception(error)
        else:
            lobby.outcome.set_result(None)
