"""The decisions of a round: quorum, leader, start, who reduces what, parts and verdict."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from opendiloco.rounds import (
    GRACE_SHARE,
    LATE_FACTOR,
    LATE_MARGIN_S,
    MAX_WAIT_FACTOR,
    MIN_GRACE_S,
    PART_VALUES,
    SPREAD_FACTOR,
    Gathering,
    after_failure,
    group_key,
    leader_order,
    plan_parts,
    quorum_size,
    reduce_shares,
    start_time,
    verdict,
)

KEY = {"run": "demo", "contract": "c0", "layout": "l0", "lineage": "a1", "round": 3}
peer_names = st.sampled_from([f"peer{index}" for index in range(20)])
quorums = st.floats(0.5, 1, exclude_max=True)
times = st.floats(0, 1e6)


# --- group key and leader ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"run": "demo2"}, {"contract": "c1"}, {"layout": "l1"}, {"lineage": "a2"}, {"round": 4}]
)
def test_peers_that_differ_in_anything_have_other_group_keys(change: dict[str, object]) -> None:
    assert group_key(**KEY) == group_key(**dict(KEY))
    assert group_key(**KEY) != group_key(**(KEY | change))  # type: ignore[arg-type]


def test_group_key_does_not_confuse_neighbouring_fields() -> None:
    assert group_key(**(KEY | {"lineage": "1", "round": 11})) != group_key(**(KEY | {"lineage": "11", "round": 1}))


@given(st.sets(peer_names, min_size=1, max_size=8), st.randoms())
def test_leader_order_is_one_for_all_and_misses_nobody(peers: set[str], random: object) -> None:
    shuffled = list(peers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert leader_order("key", shuffled) == leader_order("key", peers)
    assert set(leader_order("key", peers)) == peers


@given(st.sets(peer_names, min_size=2, max_size=8), st.data())
def test_without_its_first_choice_the_order_of_the_others_stays(peers: set[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(peers)))
    assert leader_order("key", peers - {gone}) == tuple(p for p in leader_order("key", peers) if p != gone)


def test_every_peer_leads_about_equally_often() -> None:
    leads = [leader_order(group_key(**(KEY | {"round": round})), "abcd")[0] for round in range(400)]
    assert all(60 < leads.count(peer) < 140 for peer in "abcd")


# --- quorum --------------------------------------------------------------------------------------------


@given(st.integers(1, 1024), quorums)
def test_two_groups_with_a_quorum_share_a_peer(live: int, share: float) -> None:
    assert 2 * quorum_size(live, share) > live


@given(st.integers(1, 1024), quorums)
def test_all_live_peers_together_are_always_a_quorum(live: int, share: float) -> None:
    assert live * share < quorum_size(live, share) <= live


def test_a_majority_of_small_swarms() -> None:
    assert [quorum_size(live, 0.5) for live in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]


# --- start ---------------------------------------------------------------------------------------------


@st.composite
def gatherings(draw: st.DrawFn) -> Gathering:
    here, missing, gone = draw(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3)))
    moments = draw(st.lists(times, min_size=here + missing, max_size=here + missing))
    arrived = dict(zip("abcdef", moments[:here], strict=False))
    expected = dict(zip("xyz", moments[here:], strict=False))
    now = max([*arrived.values(), 0.0]) + draw(st.floats(0, 1e4))
    return Gathering(now, arrived, expected, draw(st.floats(0, 1e5)), frozenset("xyz"[:gone]))


def at(now: float, arrived: Mapping[str, float], expected: Mapping[str, float], inner_s: float = 0.0) -> Gathering:
    return Gathering(now, arrived, expected, inner_s)


graces = st.one_of(st.just("adaptive"), st.floats(0.1, 1e4))


@given(gatherings(), quorums, graces)
def test_a_group_starts_exactly_when_it_has_a_quorum_of_all_live_peers(
    gathering: Gathering, quorum: float, grace: float | str
) -> None:
    live = len(gathering.arrived.keys() | gathering.expected.keys())
    enough = len(gathering.arrived) >= quorum_size(live, quorum)
    assert (start_time(gathering, quorum=quorum, grace=grace) is not None) == enough  # type: ignore[arg-type]


@given(gatherings(), quorums, graces)
def test_nobody_missing_means_no_wait_at_all(gathering: Gathering, quorum: float, grace: float | str) -> None:
    missing = gathering.expected.keys() - gathering.arrived.keys()
    start = start_time(replace(gathering, gone=frozenset(missing)), quorum=quorum, grace=grace)  # type: ignore[arg-type]
    assert start is None or start == max(gathering.arrived.values())


def test_a_peer_that_dropped_out_is_not_awaited_but_still_counts_for_the_quorum() -> None:
    two_of_four = Gathering(9.0, {"a": 1.0, "b": 2.0}, {"c": 3.0, "d": 3.0}, 10.0, frozenset("cd"))
    assert start_time(two_of_four, quorum=0.5, grace="adaptive") is None
    three = replace(two_of_four, arrived={"a": 1.0, "b": 2.0, "c": 4.0}, gone=frozenset("d"))
    assert start_time(three, quorum=0.5, grace="adaptive") == 4.0


def test_who_is_late_is_waited_for_as_far_as_an_exchange_is_worth_it_and_counts_for_no_quorum() -> None:
    two = Gathering(9.0, {"a": 1.0, "b": 2.0}, {}, 1.0, exchange_s=10.0)
    bound = 2.0 + LATE_FACTOR * 10.0
    for late, start in [
        ({}, 2.0),
        ({"c": 8.0}, 8.0 + LATE_MARGIN_S),
        ({"c": 0.0}, 2.0),  # it should have been here
        ({"c": bound, "d": 5.0}, 5.0 + LATE_MARGIN_S),  # one comes too late in any case
        ({"c": 4.0, "d": 5.0, "e": 6.0}, 6.0 + LATE_MARGIN_S),  # three are no majority of five that could stop two
    ]:
        assert start_time(replace(two, late=late), quorum=0.5, grace="adaptive") == start
    assert start_time(replace(two, late={"c": 8.0}, gone=frozenset("c")), quorum=0.5, grace="adaptive") == 2.0
    without_measure = replace(two, late={"c": 2.0 + MIN_GRACE_S - LATE_MARGIN_S}, exchange_s=0.0)
    assert start_time(without_measure, quorum=0.5, grace=1.0) == 2.0 + MIN_GRACE_S


def test_a_fixed_grace_counts_from_the_first_arrival() -> None:
    assert start_time(at(9.0, {"a": 5.0, "b": 8.0}, {"c": 6.0}), quorum=0.5, grace=30.0) == 35.0


def test_adaptive_grace_is_the_median_plus_a_multiple_of_the_spread() -> None:
    arrived = {"a": 0.0, "b": 100.0, "c": 200.0}
    start = start_time(at(201.0, arrived, {"d": 1e9}, inner_s=1000.0), quorum=0.5, grace="adaptive")
    assert start == 100.0 + max(MIN_GRACE_S, SPREAD_FACTOR * 100.0, GRACE_SHARE * 1000.0)


def test_one_straggler_does_not_decide_how_long_the_others_wait() -> None:
    arrived = {"a": 10.0, "b": 11.0, "c": 12.0}
    starts = [
        start_time(at(13.0, arrived, {"d": finish}, inner_s=20.0), quorum=0.5, grace="adaptive")
        for finish in (14.0, 1e3, 1e9)
    ]
    assert starts[0] is not None
    assert starts == starts[:1] * 3


@given(gatherings(), quorums, st.floats(0, 1e6))
def test_the_adaptive_grace_never_recedes_while_nobody_new_arrives(
    gathering: Gathering, quorum: float, later_s: float
) -> None:
    start = start_time(gathering, quorum=quorum, grace="adaptive")
    later = replace(gathering, now=gathering.now + later_s)
    assert start_time(later, quorum=quorum, grace="adaptive") == start


@given(gatherings(), quorums)
def test_the_adaptive_wait_is_bounded_by_the_length_of_an_inner_phase(gathering: Gathering, quorum: float) -> None:
    start = start_time(gathering, quorum=quorum, grace="adaptive")
    assume(start is not None)
    assert start is not None
    bound = min(gathering.arrived.values()) + max(MIN_GRACE_S, MAX_WAIT_FACTOR * gathering.inner_s)
    assert start <= max(bound, max(gathering.arrived.values()))


@given(gatherings(), quorums)
def test_whoever_comes_within_the_grace_after_the_median_arrival_is_waited_for(
    gathering: Gathering, quorum: float
) -> None:
    """The median peer and all before it are never left out, nor is one that comes a moment later."""
    start = start_time(gathering, quorum=quorum, grace="adaptive")
    assume(start is not None)
    assert start is not None
    assert start >= min(gathering.arrived.values())
    if gathering.expected.keys() - gathering.arrived.keys() - gathering.gone:
        assert start >= min(gathering.arrived.values()) + MIN_GRACE_S


# --- who reduces how much ------------------------------------------------------------------------------

bandwidth_lists = st.lists(st.one_of(st.just(0.0), st.floats(1, 1e12)), min_size=1, max_size=9).filter(any)
offered = st.lists(st.none() | st.floats(0, 1e15), min_size=1, max_size=5)


def finish_time(bandwidths: list[float], shares: tuple[float, ...]) -> float:
    """When the last peer has moved its 1 + (k - 2) * share vectors; peers that reduce nothing do not differ."""
    k = len(bandwidths)
    return max((1 + (k - 2) * s) / b for b, s in zip(bandwidths, shares, strict=True) if b > 0)


@given(bandwidth_lists)
def test_shares_cover_the_vector_and_peers_without_bandwidth_reduce_nothing(bandwidths: list[float]) -> None:
    shares = reduce_shares(bandwidths)
    assert math.isclose(sum(shares), 1, rel_tol=1e-9)
    assert all(0 <= share <= 1 for share in shares)
    assert all(share == 0 for share, bandwidth in zip(shares, bandwidths, strict=True) if bandwidth == 0)


@given(offered.filter(lambda bandwidths: any(bandwidth != 0 for bandwidth in bandwidths)))
def test_any_bandwidths_that_peers_may_name_give_shares(bandwidths: list[float | None]) -> None:
    shares = reduce_shares(bandwidths)
    assert all(0 <= share <= 1 for share in shares)
    assert math.isclose(sum(shares), 1, rel_tol=1e-9)


@given(st.lists(st.floats(1, 1e12), min_size=3, max_size=9))
def test_a_peer_reduces_as_much_as_others_unless_its_link_is_less_than_half_of_the_usual_one(
    bandwidths: list[float],
) -> None:
    usual = sorted(bandwidths)[len(bandwidths) // 2]
    shares = reduce_shares(bandwidths)
    assert {share > 0 for share, b in zip(shares, bandwidths, strict=True) if b >= usual / 2} == {True}
    assert not any(share for share, b in zip(shares, bandwidths, strict=True) if b < usual / 2)
    assert len(set(shares) - {0.0}) == 1


@given(bandwidth_lists, st.data())
def test_a_peer_that_has_not_measured_its_bandwidth_reduces_as_much_as_any_other(
    bandwidths: list[float], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(bandwidths)))
    shares = reduce_shares([*bandwidths[:place], None, *bandwidths[place:]])
    assert shares[place] == max(shares)


def test_peers_that_have_measured_nothing_yet_split_evenly() -> None:
    assert reduce_shares([None, None, 0.0, None]) == (1 / 3, 1 / 3, 0.0, 1 / 3)


def test_a_slow_link_is_relieved() -> None:
    bandwidths = [1.0, 1000.0, 1000.0, 1000.0]
    assert reduce_shares(bandwidths)[0] == 0
    assert finish_time(bandwidths, reduce_shares(bandwidths)) == 1.0


@pytest.mark.parametrize("bandwidths", [[5.0], [3.0, 90.0], [10.0, 11.0, 14.9], [7.0, 7.0, 7.0, 7.0]])
def test_near_equal_links_and_pairs_split_evenly(bandwidths: list[float]) -> None:
    assert reduce_shares(bandwidths) == (1 / len(bandwidths),) * len(bandwidths)


@pytest.mark.parametrize("bandwidths", [[0.0], [0.0, 0.0, 0.0], []])
def test_a_group_in_which_nobody_can_reduce_is_an_error(bandwidths: list[float]) -> None:
    with pytest.raises(ValueError, match="nobody can reduce"):
        reduce_shares(bandwidths)


# --- parts ---------------------------------------------------------------------------------------------

some_shares = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=1, max_size=9).filter(any)


@given(st.integers(0, 5_000_000), some_shares, st.sampled_from([1, 7, 1024]))
def test_parts_cover_the_vector_exactly_once_in_order(numel: int, shares: list[float], alignment: int) -> None:
    plan = plan_parts(numel, shares, alignment=alignment)
    parts = [part for parts in plan for part in parts]
    edges = [0] + [part.stop for part in parts]
    assert [part.start for part in parts] == edges[:-1]
    assert edges[-1] == numel
    assert len(plan) == len(shares)
    assert all(0 < part.size <= PART_VALUES for part in parts)
    assert all(parts[0].start % alignment == 0 for parts in plan if parts)


@given(st.integers(0, 5_000_000), some_shares)
def test_a_share_of_zero_gets_no_part(numel: int, shares: list[float]) -> None:
    plan = plan_parts(numel, shares, alignment=1024)
    assert all(not parts for parts, share in zip(plan, shares, strict=True) if share == 0)


@given(st.integers(0, 5_000_000), some_shares)
def test_slices_are_as_large_as_their_shares_within_a_block(numel: int, shares: list[float]) -> None:
    plan = plan_parts(numel, shares, alignment=1024)
    for parts, share in zip(plan, shares, strict=True):
        assert abs(sum(part.size for part in parts) - numel * share / sum(shares)) <= 1024 + 1


def test_parts_begin_at_blocks_so_that_codecs_see_whole_ones() -> None:
    parts = [part for parts in plan_parts(3 * PART_VALUES + 5, [0.3, 0.0, 0.7], alignment=1024) for part in parts]
    assert all(part.start % 1024 == 0 for part in parts)


@pytest.mark.parametrize("numel", [1, 5000])
def test_a_plan_that_would_leave_values_out_is_an_error(numel: int) -> None:
    with pytest.raises(ValueError, match="share"):
        plan_parts(numel, [0.0, 0.0], alignment=1024)


# --- verdict -------------------------------------------------------------------------------------------


def subsets(members: str) -> list[frozenset[str]]:
    return [frozenset(c) for size in range(len(members) + 1) for c in itertools.combinations(members, size)]


@pytest.mark.parametrize("members", ["a", "ab", "abc", "abcd"])
def test_commit_exactly_when_every_part_came_and_all_hold_the_same_peers(members: str) -> None:
    contributions = subsets(members)
    for count in range(4):
        for masks in itertools.combinations_with_replacement(contributions, count):
            for missing in (0, 1, 2):
                whole = missing == 0 and len(set(masks)) <= 1 and all(masks)
                assert verdict(members, masks, missing) == ("commit" if whole else "retry"), (masks, missing)


@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
def test_a_group_that_shrank_below_the_quorum_commits_nothing(quorum: int) -> None:
    for contributors in subsets("abcd"):
        found = verdict("abcd", [contributors], 0, quorum=quorum)
        assert found == ("commit" if len(contributors) >= quorum else "retry")


def attempts() -> Iterator[tuple[dict[str, frozenset[str]], dict[str, set[str]]]]:
    """Every all-reduce of three members: who is in the average of each one's slice, and which slices each one got."""
    members = "abc"
    subsets = [frozenset(group) for size in range(3) for group in itertools.combinations(members, size)]
    masks = [[subset | {owner} for subset in subsets if owner not in subset] for owner in members]
    arrivals = [[set(subset) | {owner} for subset in subsets if owner not in subset] for owner in members]
    for in_slices, got in itertools.product(itertools.product(*masks), itertools.product(*arrivals)):
        yield dict(zip(members, in_slices, strict=True)), dict(zip(members, got, strict=True))


def test_every_combination_of_who_has_what_comes_to_one_average_or_to_none() -> None:
    counts: Counter[str] = Counter()
    for in_slice, got in attempts():
        first = {
            peer: verdict("abc", [in_slice[owner] for owner in got[peer]], 3 - len(got[peer]), quorum=2) for peer in got
        }
        committed = [peer for peer, found in first.items() if found == "commit"]
        assert len({in_slice[owner] for peer in committed for owner in got[peer]}) <= 1
        assert all(len(in_slice[peer]) >= 2 for peer in committed)
        others = [peer for peer in first if peer not in committed]
        final = {after_failure({}, committed_by=committed)[0] for _ in others}
        assert final == ({"resync"} if committed else {"retry"}) or not others
        counts["nobody" if not committed else "all" if not others else "some"] += 1
    assert sum(counts.values()) == 4**3 * 4**3
    assert min(counts.values()) > 0


def test_what_failed_is_told_with_the_peer_it_failed_at() -> None:
    failures = {"c": "connection lost", "b": "sent nothing for 5 s"}
    assert after_failure(failures, committed_by=[]) == ("retry", "b: sent nothing for 5 s; c: connection lost")
    assert after_failure({}, committed_by=[]) == ("retry", "participants differed between parts, or were too few")
    found = after_failure({"c": "connection lost"}, committed_by=["b", "a"])
    assert found == ("resync", "a, b committed it; here: c: connection lost")
