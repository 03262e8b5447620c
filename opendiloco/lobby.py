"""The leader's side of a rendezvous: who has arrived for a round, when its group starts, who is in, who reduces what.

Whoever is left out of a group hears that it started, asks again, and waits as one that is late does: until the others
have committed, and it catches up with them, or until they come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from opendiloco.allreduce import Group, Member
from opendiloco.ledger import MAX_READINGS, Reading
from opendiloco.rounds import Gathering, quorum_size, reduce_shares, start_time

REFRESH_S = 1.0  # between two looks at the DHT while somebody waits
CHECK_S = 0.25  # between two looks at what is known
MAX_MEMBERS = 1024

Weight = Annotated[float, Field(ge=0, le=1e15)]
Tokens = Annotated[int, Field(ge=0, le=2**50)]
Readings = Annotated[list[Reading], Field(max_length=MAX_READINGS)]


class Offer(BaseModel):
    """What an arriving peer brings; it comes from another peer and is checked on the way in."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    weight: Weight
    """Of its values in the average; 0: it brings none and only wants the average."""
    tokens: Tokens
    readings: Readings
    bandwidth: Annotated[float, Field(ge=0, le=1e15)] | None
    """Bytes per second; 0: reduces nothing; None: not measured yet."""
    gone: list[Annotated[str, Field(max_length=128)]] = Field(max_length=MAX_MEMBERS)
    """Peers that dropped out of this round before this peer's eyes."""
    last_group: bytes = Field(max_length=16)
    """Id of the last group of this round that it was in; empty if none."""


class Place(BaseModel):
    """A member's place in the group, as the leader assigns it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    weight: Weight
    tokens: Tokens
    readings: Readings
    share: Annotated[float, Field(ge=0, le=1)]
    wait_s: Annotated[float, Field(ge=0)]
    """From the member's arrival to the last one."""
    quorum: Annotated[int, Field(ge=1, le=MAX_MEMBERS)]
    """Fewest members whose values may make a round; the same for all."""
    live: Annotated[int, Field(ge=1, le=2**20)]
    """Workers of the round that are alive, in the group or not; the same for all."""

    @model_validator(mode="after")
    def _followers_reduce_nothing(self) -> Self:
        if self.share and not self.weight:
            raise ValueError("a share of the vector for a peer that brings no values")
        return self


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
    """Length of a usual inner phase."""
    is_behind: bool = False
    """Whether the swarm is on a heavier lineage than this peer: then no group may start here."""
    late: Mapping[str, float] = field(default_factory=dict)
    """See `rounds.Gathering`; this process's clock."""
    exchange_s: float = 0.0
    """Length of the last all-reduce."""


@dataclass(frozen=True)
class Rules:
    """When a group may start; see `rounds.start_time`."""

    quorum: float
    grace: float | Literal["adaptive"]


@dataclass(frozen=True)
class Start:
    """A group that has started, with every member's place in it."""

    group: Group
    places: Mapping[str, Place]


@dataclass(frozen=True)
class _Arrival:
    offer: Offer
    time: float


@dataclass
class Lobby:
    """Who has arrived at this peer for the round of group key `key`."""

    key: str
    started: asyncio.Future[Start | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The group, or None when everybody left or the round is over."""
    _arrivals: dict[str, _Arrival] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, peer: str, offer: Offer) -> None:
        """A peer has arrived."""
        self._arrivals[peer] = _Arrival(offer, time.monotonic())
        self._changed.set()

    def leave(self, peer: str) -> None:
        """A peer went away again, or has got its answer."""
        if not self.started.done():
            self._arrivals.pop(peer, None)
            self._changed.set()

    async def run(self, rules: Rules, outlook: Callable[[], Outlook], refresh: Callable[[], Awaitable[None]]) -> None:
        """Start the group the moment the last live peer is there, or after the grace with a quorum."""
        try:
            await self._run(rules, outlook, refresh)
        except Exception as error:  # those who wait here get it
            self.started.set_exception(error)
        finally:
            if not self.started.done():
                self.started.set_result(None)

    async def _run(self, rules: Rules, outlook: Callable[[], Outlook], refresh: Callable[[], Awaitable[None]]) -> None:
        refreshed = time.monotonic()
        while self._arrivals and outlook().key == self.key:
            self._changed.clear()
            now = time.monotonic()
            if now - refreshed > REFRESH_S:
                await refresh()
                refreshed = time.monotonic()
            start = start_time(self._gathering(rules, outlook()), quorum=rules.quorum, grace=rules.grace)
            if outlook().is_behind:
                start = None
            if start is not None and start <= now and self._start(rules, outlook()):
                return
            pause_s = CHECK_S if start is None else min(CHECK_S, max(start - now, 0.0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    def _gathering(self, rules: Rules, outlook: Outlook) -> Gathering:
        voters = {peer: arrival.time for peer, arrival in self._arrivals.items() if arrival.offer.weight}
        followers = self._arrivals.keys() - voters.keys()
        finish = {peer: candidate.expected_finish for peer, candidate in outlook.candidates.items()}
        live = {peer: at for peer, at in (voters | finish).items() if peer not in followers}
        gone = dropped_out({peer: arrival.offer.gone for peer, arrival in self._arrivals.items()})
        others = live.keys() - gone
        if len(others) < quorum_size(len(live), rules.quorum) or not any(map(self._may_reduce, others)):
            gone -= voters.keys()  # there is no round without them
        return Gathering(
            now=time.monotonic(),
            arrived={peer: at for peer, at in voters.items() if peer not in gone},
            expected=live,
            inner_s=outlook.inner_s,
            gone=gone,
            late={peer: at for peer, at in outlook.late.items() if peer not in self._arrivals},
            exchange_s=outlook.exchange_s,
        )

    def _may_reduce(self, peer: str) -> bool:
        return peer not in self._arrivals or self._arrivals[peer].offer.bandwidth != 0

    def _start(self, rules: Rules, outlook: Outlook) -> bool:
        """Fix the members; False when nobody among them could reduce."""
        gathering = self._gathering(rules, outlook)
        inside = self._arrivals.keys() - gathering.gone
        peers = sorted(inside, key=lambda peer: (peer not in gathering.arrived, peer))[:MAX_MEMBERS]
        offers = {peer: self._arrivals[peer].offer for peer in peers}
        able = [offer.bandwidth if offer.weight else 0.0 for offer in offers.values()]
        if not any(bandwidth != 0 for bandwidth in able):
            return False
        last = max(gathering.arrived.values())
        live = gathering.arrived.keys() | gathering.expected.keys()
        shares = reduce_shares(able)
        places = {
            peer: Place(
                weight=offers[peer].weight,
                tokens=offers[peer].tokens,
                readings=offers[peer].readings,
                share=share,
                wait_s=max(0.0, last - self._arrivals[peer].time),
                quorum=quorum_size(len(live), rules.quorum),
                live=len(live | offers.keys()),
            )
            for peer, share in zip(peers, shares, strict=True)
        }
        self.started.set_result(Start(group_of(secrets.token_bytes(16), places), places))
        return True


def dropped_out(named: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Peers that are not waited for and, if they come all the same, stay outside: they might break every attempt.

    Args:
        named: of each arrival, whom it saw drop out. More than half of those other than a peer must name it: one that
            blames others, or has lost its own connection, keeps nobody out.
    """
    counts = Counter(peer for arrival, peers in named.items() for peer in {*peers} - {arrival})
    return frozenset(peer for peer, count in counts.items() if 2 * count > len(named.keys() - {peer}))


def group_of(group_id: bytes, places: Mapping[str, Place]) -> Group:
    """The group with these places."""
    members = (
        Member(peer, place.weight, place.tokens, place.share, tuple(place.readings))
        for peer, place in sorted(places.items())
    )
    quorum, live = (max(getattr(place, name) for place in places.values()) for name in ("quorum", "live"))
    return Group(group_id, tuple(members), quorum, live)
