"""Who is let into a group: everybody, but for those that most others saw drop out, if there is a round without them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.lobby import Candidate, Lobby, Offer, Outlook, Rules, Start, dropped_out
from opendiloco.rendezvous import Assembly, Rendezvous, RoundCall
from opendiloco.rounds import leader_order

LATER = math.inf  # in an inner phase that goes on


def offer(gone: Collection[str] = "", *, weight: float = 1.0, bandwidth: float | None = None) -> Offer:
    return Offer(weight=weight, tokens=1, readings=[], bandwidth=bandwidth, gone=sorted(gone), last_group=b"")


def start_of(
    offers: Mapping[str, Offer], *, missing: str = "", grace: float = 3600.0, patience_s: float = 0.05
) -> Start | None:
    """The group that starts with these arrivals, or None when it waits for those in `missing`."""

    async def run() -> Start | None:
        lobby = Lobby("key")
        for peer, brought in offers.items():
            lobby.enter(peer, brought)
        voters = [peer for peer, brought in offers.items() if brought.weight]
        outlook = Outlook("key", {peer: Candidate(LATER, can_lead=True) for peer in [*voters, *missing]}, 1.0)

        async def refresh() -> None:
            return

        running = asyncio.create_task(lobby.run(Rules(quorum=0.5, grace=grace), lambda: outlook, refresh))
        await asyncio.wait({lobby.started}, timeout=patience_s)
        start = lobby.started.result() if lobby.started.done() else None
        running.cancel()
        await asyncio.wait({running})
        return start

    return asyncio.run(run())


def test_whoever_more_than_half_of_the_others_saw_drop_out_is_left_out_and_counts_for_the_quorum() -> None:
    start = start_of({"a": offer("c"), "b": offer("c"), "c": offer()})
    assert start is not None
    assert start.group.peers == ("a", "b")
    assert start.group.quorum == 2  # of three that live
    four = start_of({"a": offer("c"), "b": offer("c"), "c": offer(), "d": offer()})
    assert four is not None
    assert four.group.peers == ("a", "b", "d")
    assert four.group.quorum == 3


def test_one_that_blames_everybody_keeps_nobody_out() -> None:
    start = start_of({"a": offer("c"), "b": offer("c"), "c": offer("ab")})
    assert start is not None
    assert start.group.peers == ("a", "b")
    undecided = start_of({"a": offer(), "b": offer(), "c": offer("ab")})
    assert undecided is not None
    assert undecided.group.peers == ("a", "b", "c")


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_where_all_blame_each_other_all_try_again(names: str) -> None:
    start = start_of({peer: offer(set(names) - {peer}) for peer in names})
    assert start is not None
    assert start.group.peers == tuple(names)


def test_the_quorum_is_waited_for_where_it_can_still_come_and_else_nobody_is_left_out() -> None:
    arrived = {"a": offer("c"), "b": offer("c"), "c": offer()}
    assert start_of(arrived, missing="de", grace=0.0) is None  # d may come: 3 of 5 without c
    gone = {peer: offer("cde") for peer in "ab"} | {"c": offer()}
    start = start_of(gone, missing="de")  # neither d nor e comes
    assert start is not None
    assert start.group.peers == ("a", "b", "c")


def test_a_word_of_one_among_several_does_not_make_the_group_start_without_a_live_peer() -> None:
    assert start_of({"a": offer(), "c": offer("b")}, missing="b") is None
    without = start_of({"a": offer("b"), "c": offer("b")}, missing="b")
    assert without is not None
    assert without.group.peers == ("a", "c")


def test_the_only_one_that_can_reduce_is_never_left_out() -> None:
    start = start_of({"a": offer("c", bandwidth=0.0), "b": offer("c", bandwidth=0.0), "c": offer()})
    assert start is not None
    assert start.group.peers == ("a", "b", "c")


def test_a_follower_that_most_saw_drop_out_is_left_out_too() -> None:
    start = start_of({"a": offer("f"), "b": offer("f"), "f": offer(weight=0.0)})
    assert start is not None
    assert start.group.peers == ("a", "b")


peers = st.sampled_from("abcdefg")


@given(st.dictionaries(peers, st.frozensets(peers)))
def test_dropped_out_are_those_whom_most_others_name_and_nobody_by_its_own_word(
    named: dict[str, frozenset[str]],
) -> None:
    found = dropped_out(named)
    for peer in "abcdefg":
        others = [names for arrival, names in named.items() if arrival != peer]
        assert (peer in found) == (sum(peer in names for names in others) > len(others) / 2)


def rendezvous_of(peer: str, outlook: Outlook) -> Rendezvous:
    async def nothing(peer: object = None) -> bool:
        return True

    p2p, rules = cast(Any, SimpleNamespace(peer_id=peer)), Rules(quorum=0.5, grace=3600.0)
    return Rendezvous(p2p, rules, outlook=lambda: outlook, refresh=cast(Any, nothing), is_alive=nothing, silence_s=1.0)


def test_a_leader_leaves_itself_out_of_the_group_too_and_asks_again() -> None:
    leader, *others = leader_order("key", "abc")
    outlook = Outlook("key", {peer: Candidate(LATER, can_lead=True) for peer in "abc"}, 1.0)

    async def run() -> None:
        rendezvous = rendezvous_of(leader, outlook)
        lobby = rendezvous._lobby_of("key")
        for peer in others:
            lobby.enter(peer, offer(leader))
        assert await rendezvous._lead("key", offer()) is None
        start = lobby.started.result()
        assert start is not None
        assert set(start.group.peers) == set(others)

    asyncio.run(run())


@pytest.mark.parametrize("me", [1, 2])
def test_a_leader_that_was_seen_to_drop_out_is_not_asked_to_lead_the_next_attempt(
    me: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might let everybody in again, itself included."""
    order = leader_order("key", "abc")
    outlook = Outlook("key", {peer: Candidate(LATER, can_lead=True) for peer in "abc"}, 1.0)
    nothing = cast(Any, None)
    rendezvous = rendezvous_of(order[me], outlook)
    group = Assembly(nothing, 0.0)
    asked: list[str] = []

    async def follow(leader: str, key: str, offer: Offer) -> Assembly:
        asked.append(leader)
        return group

    async def lead(key: str, offer: Offer) -> Assembly:
        return await follow(order[me], key, offer)

    monkeypatch.setattr(rendezvous, "_follow", follow)
    monkeypatch.setattr(rendezvous, "_lead", lead)
    for gone, leader in ((frozenset[str](), order[0]), (frozenset(order[0]), order[1])):
        asyncio.run(rendezvous.gather(RoundCall("key", 1.0, 1, (), None, gone)))
        assert asked.pop() == leader
