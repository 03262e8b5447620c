"""Who is in a round and when it starts: everybody who lives, at once; without stragglers at the deadline."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opendiloco.allreduce import Attempt, Group
from opendiloco.errors import SettingsError
from opendiloco.rounds import Position, RoundOutcome, RoundRequest, leader_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.peers import Network, Peer
    from support.waiting import WaitUntil

pytestmark = pytest.mark.timing

LONG_S = 600.0
AT_ONCE_S = 1.0


def ids(peers: Sequence[Peer]) -> set[str]:
    return {peer.peer_id for peer in peers}


def arrive(peers: Sequence[Peer]) -> list[Future[RoundOutcome]]:
    return [peer.average() for peer in peers]


def results(futures: Sequence[Future[RoundOutcome]], limit_s: float = 30.0) -> list[RoundOutcome]:
    return [future.result(limit_s) for future in futures]


def test_four_workers_that_are_there_start_within_a_second(network: Network) -> None:
    """The median of some rounds: the machine may be busy, but a fixed waiting time would be in all of them."""
    workers = network.workers(4, grace=LONG_S)
    took_s = []
    for _ in range(9):
        started = time.monotonic()
        outcomes = results(arrive(workers))
        took_s.append(time.monotonic() - started)
        assert all(set(outcome.weights) == ids(workers) for outcome in outcomes)
        for peer, outcome in zip(workers, outcomes, strict=True):
            peer.commit(outcome)
    assert statistics.median(took_s) < 1.0


def test_group_waits_for_the_last_live_peer_and_starts_the_moment_it_comes(
    network: Network, wait_until: WaitUntil
) -> None:
    workers = network.workers(3, grace=LONG_S)
    network.round(workers)
    early = arrive(workers[:2])
    wait_until(lambda: workers[0].awaited().startswith("2 of 3 workers are there"), "two have arrived")
    assert workers[2].peer_id in workers[0].awaited()
    assert not any(future.done() for future in early)
    came = time.monotonic()
    outcomes = results([*early, workers[2].average()])
    assert time.monotonic() - came < AT_ONCE_S
    assert all(set(outcome.weights) == ids(workers) for outcome in outcomes)
    assert outcomes[0].wait_s > 0
    assert outcomes[2].wait_s < outcomes[0].wait_s


def test_straggler_is_left_out_at_the_deadline_and_told_to_catch_up(network: Network) -> None:
    workers = network.workers(3, grace=2.0)
    started = time.monotonic()
    outcomes = results(arrive(workers[:2]))
    took_s = time.monotonic() - started
    assert 2.0 <= took_s < 10.0  # records live for 20 s: nobody waited for the straggler's to expire
    assert all(set(outcome.weights) == ids(workers[:2]) for outcome in outcomes)
    assert [outcome.live for outcome in outcomes] == [3, 3]
    for peer, outcome in zip(workers, outcomes, strict=False):
        peer.commit(outcome)
    late = workers[2].average().result(30)
    assert late.verdict == "resync"
    assert "the swarm is at round 1" in late.reason
    assert "this worker at 0" in late.reason
    assert late.weights == {}


def test_half_of_the_live_peers_never_start_whatever_the_deadline(network: Network, wait_until: WaitUntil) -> None:
    workers = network.workers(4, grace=0.2)
    half = arrive(workers[:2])
    wait_until(lambda: workers[0].awaited().startswith("2 of 4 workers are there"), "two have arrived")
    with pytest.raises(TimeoutError):
        half[0].result(2.0)
    assert not half[1].done()
    outcomes = results([*half, workers[2].average()])
    assert all(set(outcome.weights) == ids(workers[:3]) for outcome in outcomes)


def test_peer_that_leaves_is_not_waited_for(network: Network) -> None:
    workers = network.workers(4, grace=LONG_S)
    half = arrive(workers[:2])
    for peer in workers[2:]:
        peer.leave()
    outcomes = results(half, limit_s=5.0)
    assert all(set(outcome.weights) == ids(workers[:2]) for outcome in outcomes)
    assert [outcome.live for outcome in outcomes] == [2, 2]


def test_peer_that_falls_silent_is_waited_for_until_its_record_expires(network: Network) -> None:
    workers = network.workers(3, grace=LONG_S, settings={"heartbeat_s": 0.5, "expiry_s": 3.0})
    waiting = arrive(workers[:2])
    workers[2].close()
    outcomes = results(waiting, limit_s=10.0)
    assert all(set(outcome.weights) == ids(workers[:2]) for outcome in outcomes)


def test_last_one_standing_goes_on_alone(network: Network) -> None:
    workers = network.workers(3, grace=LONG_S)
    network.round(workers)
    for peer in workers[1:]:
        peer.leave()
    outcome = workers[0].average().result(10.0)
    assert set(outcome.weights) == ids(workers[:1])


def all_know(workers: Sequence[Peer], follower: Peer) -> bool:
    others = [peer for peer in workers if peer is not follower]
    return (
        all(peer.awaits(other) for peer in workers for other in others if peer is not other)
        and not any(peer.awaits(follower) for peer in others)
        and any(peer.gathers(follower) for peer in others)
    )


def test_follower_takes_the_round_together_with_the_others(network: Network, wait_until: WaitUntil) -> None:
    workers = network.workers(3, grace=LONG_S, size=5000)
    for round in range(3):
        for peer in workers:
            peer.vectors["pseudo_gradient"].normal_()
        follower = workers[round]
        others = [peer for peer in workers if peer is not follower]
        following = follower.average(0.0)
        wait_until(lambda: all_know(workers, follower), "all know who follows, and it waits at the leader")  # noqa: B023
        outcomes = results([following, *arrive(others)])
        assert all((outcome.verdict, set(outcome.weights)) == ("commit", ids(others)) for outcome in outcomes)
        assert len({outcome.lineage for outcome in outcomes}) == 1
        averages = [peer.vectors["average"] for peer in workers]
        assert all(torch.equal(average, averages[0]) for average in averages)
        for peer, outcome in zip([follower, *others], outcomes, strict=True):
            peer.commit(outcome)


def test_nobody_waits_for_a_follower_that_does_not_come(network: Network, wait_until: WaitUntil) -> None:
    workers = network.workers(3, grace=LONG_S)
    network.run(workers[2].process.begin_phase(True, 0))
    wait_until(lambda: not any(peer.awaits(workers[2]) for peer in workers[:2]), "the others know that it follows")
    came = time.monotonic()
    outcomes = results(arrive(workers[:2]))
    assert time.monotonic() - came < AT_ONCE_S
    assert all(set(outcome.weights) == ids(workers[:2]) for outcome in outcomes)


def test_a_worker_that_needs_longer_for_a_round_than_others_for_a_phase_is_waited_for_and_is_back(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is a round behind for ever: when it has fetched one, the others are in the exchange of the next."""
    phase_s, fetch_s, exchange_s = 0.2, 1.5, 2.0
    *others, slow = workers = network.workers(3, grace=1.0)
    results([worker.finish_round() for worker in workers])

    def slow_down(thing: object, name: str, seconds: float) -> None:
        work = getattr(thing, name)

        async def work_slowly(*arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(seconds)
            return await work(*arguments, **named)

        monkeypatch.setattr(thing, name, work_slowly)

    slow_down(slow.process._recoverer, "_replay_one", fetch_s)
    for worker in workers:
        slow_down(worker.process._participation._groups, "reduce", exchange_s)

    async def follow() -> list[str]:
        """What a trainer does that comes in at the end of the others' phases."""
        verdicts = list[str]()
        while verdicts[-1:] != ["commit"]:
            verdicts.append((await slow.process.average(RoundRequest(0.0, 1))).verdict)
            if verdicts[-1] == "resync":
                await slow.process.catch_up()
                await slow.process.begin_phase(True, 0)
        return verdicts

    async def train(worker: Peer) -> None:
        await asyncio.sleep(phase_s)
        await asyncio.wrap_future(worker.finish_round())

    for future in [network.start(train(worker)) for worker in others]:  # without it
        future.result(30)
    following, rounds = network.start(follow()), 0
    while not following.done():
        for future in [network.start(train(worker)) for worker in others]:
            future.result(30)
        rounds += 1
        assert rounds < 8, "it is a round behind for ever"
    *before, last = following.result()
    assert (set(before), last) == ({"resync"}, "commit")
    assert 2 <= len(before) <= 3  # the others learn of it at the second one


def test_follower_whom_all_others_have_left_need_not_follow(network: Network) -> None:
    workers = network.workers(2)
    following = workers[1].average(0.0)
    workers[0].leave()
    outcome = following.result(10.0)
    assert (outcome.verdict, outcome.reason) == ("skip", "nobody is there to follow")
    assert workers[1].average().result(10.0).weights == {workers[1].peer_id: 1.0}


def test_newcomer_is_in_the_first_round_it_is_there_for(network: Network) -> None:
    contract = network.contract(2)
    workers = network.workers(2, contract=contract)
    newcomer = network.peer(workers[0].addresses).open()
    network.enter([newcomer], contract)
    outcomes = network.round([*workers, newcomer])
    assert all(set(outcome.weights) == ids([*workers, newcomer]) for outcome in outcomes)


def test_workers_of_two_lineages_never_average_together_and_the_heavier_one_wins(
    network: Network, wait_until: WaitUntil
) -> None:
    """Also the arrivals of one lineage come to the leaders of the other one's rounds: all are on one DHT."""
    contract = network.contract(2, grace=LONG_S)
    bootstrap = network.peer().open()
    pairs = [network.peers(2, bootstrap.addresses) for _ in range(2)]
    for pair, lineage, tokens in zip(pairs, ("a" * 64, "b" * 64), (31, 30), strict=True):
        for peer in pair:
            peer.enter(contract, position=Position(3, lineage, "0" * 64, tokens))
    wait_until(lambda: all(a.awaits(b) and b.awaits(a) for a, b in pairs), "both pairs have met")
    heavier, lighter = [arrive(pair) for pair in pairs]
    assert all(set(outcome.weights) == ids(pairs[0]) for outcome in results(heavier))
    assert all((outcome.verdict, outcome.weights) == ("resync", {}) for outcome in results(lighter))


def test_worker_with_another_layout_is_refused_and_the_others_go_on(network: Network) -> None:
    contract = network.contract(2, grace=LONG_S)
    workers = network.workers(2, contract=contract)
    other = network.peer(workers[0].addresses).open()
    other.enter(contract, layout="1" * 64)
    with pytest.raises(SettingsError, match=r"run test: use the same files in model\.name and model\.start"):
        other.wait_for_start()
    outcomes = network.round(workers)
    assert all(set(outcome.weights) == ids(workers) for outcome in outcomes)


def test_worker_with_another_contract_is_refused_and_the_others_go_on(network: Network) -> None:
    workers = network.workers(2, contract=network.contract(2, grace=LONG_S))
    other = network.peer(workers[0].addresses).open()
    other.enter(network.contract(2, codec="none", grace=LONG_S))
    with pytest.raises(SettingsError, match=r"run\.id test is taken: .* leave out --run, or choose another run\.id"):
        other.wait_for_start()
    outcomes = network.round(workers)
    assert all(set(outcome.weights) == ids(workers) for outcome in outcomes)


def test_worker_with_other_initial_parameters_is_refused_and_the_others_go_on(network: Network) -> None:
    contract = network.contract(2, grace=LONG_S)
    workers = network.workers(2, contract=contract)
    other = network.peer(workers[0].addresses).open()
    other.enter(contract, position=Position(0, "f" * 64, "f" * 64))
    with pytest.raises(SettingsError, match="initial parameters ffffffffffff differ from 000000000000 of peer"):
        other.wait_for_start()
    outcomes = network.round(workers)
    assert all(set(outcome.weights) == ids(workers) for outcome in outcomes)


def test_peer_of_an_older_round_never_averages(network: Network) -> None:
    contract = network.contract(1, grace=LONG_S)
    ahead, behind = network.peers(2)
    ahead.enter(contract, position=Position(4, "a" * 64, "0" * 64, 40))
    behind.enter(contract, position=Position(3, "b" * 64, "0" * 64, 30))
    late = behind.average().result(30)
    assert (late.verdict, late.weights) == ("resync", {})
    assert ahead.average().result(30).weights == {ahead.peer_id: 1.0}


def test_client_mode_peers_by_themselves_are_told_why_their_round_waits(
    network: Network, wait_until: WaitUntil
) -> None:
    bootstrap = network.peer().open()
    clients = [network.peer(bootstrap.addresses, client_mode=True).open() for _ in range(2)]
    network.enter(clients, network.contract(2))
    rounds = [client.average() for client in clients]
    wait_until(
        lambda: all("none of the 2 workers can be reached" in client.awaited() for client in clients), "they know why"
    )
    reachable = network.peer(bootstrap.addresses).open()
    network.enter([reachable], network.contract(2))
    recovery = network.run(reachable.process.catch_up())
    assert (recovery.inner_step, recovery.phase_s) == (0, 0.0)  # they need its whole phase, not its company
    rounds.append(reachable.average())
    assert all(outcome.verdict == "commit" for outcome in (future.result(30) for future in rounds))


def test_client_mode_peer_takes_part_and_reduces_nothing(network: Network) -> None:
    size = 300_000
    contract = network.contract(3, codec="none")
    reachable = network.peers(2)
    client = network.peer(reachable[0].addresses, client_mode=True).open()
    everybody = [*reachable, client]
    network.enter(everybody, contract, size=size)
    for _ in range(3):
        for index, peer in enumerate(everybody):
            peer.vectors["pseudo_gradient"].fill_(float(index))
        outcomes = network.round(everybody)
        assert all(set(outcome.weights) == ids(everybody) for outcome in outcomes)
        assert all(bool((peer.vectors["average"] == 1.0).all()) for peer in everybody)
        # It sends its own vector and gets the average; reducers also answer both others with their shares.
        vector = 4 * size
        assert outcomes[2].sent_bytes == pytest.approx(vector, rel=0.01)
        assert outcomes[2].received_bytes == pytest.approx(vector, rel=0.01)
        assert sum(outcome.sent_bytes for outcome in outcomes[:2]) == pytest.approx(3 * vector, rel=0.01)


def test_a_leader_that_tries_a_frozen_one_first_keeps_who_told_it_of_that(
    network: Network, wait_until: WaitUntil
) -> None:
    """The follower has seen it drop out, the leader has not yet: finding out takes longer than a silence may last."""
    workers = network.workers(3, grace=LONG_S, failure_timeout_s=1.0)
    network.round(workers)
    key = workers[0].process._presence.outlook().key
    order = leader_order(key, ids(workers))
    frozen, leader, follower = sorted(workers, key=lambda peer: order.index(peer.peer_id))
    for peer in (leader, follower):
        peer.process._participation._dropped = {key: {frozen.peer_id}}
    frozen.daemon.send_signal(signal.SIGSTOP)
    first = follower.average()
    wait_until(lambda: leader.gathers(follower), "the leader has given the frozen one up")
    assert leader.peer_id not in follower.process._participation._rendezvous._unreachable._pause_s
    came = time.monotonic()
    outcomes = results([first, leader.average()])
    assert time.monotonic() - came < 2 * AT_ONCE_S
    assert all(set(outcome.weights) == ids([leader, follower]) for outcome in outcomes)


def test_a_worker_that_comes_to_every_group_and_reduces_in_none_does_not_keep_the_others_from_their_round(
    network: Network, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = network.workers(3, grace=LONG_S, size=5000, failure_timeout_s=1.5)
    wait_until(lambda: all(peer.candidates == ids(workers) for peer in workers), "all see the same workers")
    presence = workers[0].process._presence
    leader = workers[0].process._participation._rendezvous._leader(presence.outlook().key)
    broken = next(peer for peer in workers if peer.peer_id != leader)
    others = [peer for peer in workers if peer is not broken]

    async def refuse(group_id: bytes) -> None:
        return

    async def fail(group: Group, **vectors: torch.Tensor) -> Attempt:
        return Attempt("retry", {}, {}, {}, "", [], [], {}, 0, 0, None)

    async def committed_by(group: Group) -> list[str]:
        return []  # it is back before the others have found out that it is of no use

    participation = broken.process._participation
    monkeypatch.setattr(participation._groups, "_find", refuse)
    monkeypatch.setattr(participation._groups, "reduce", fail)
    monkeypatch.setattr(participation, "_committed_by", committed_by)
    rounds = {peer.peer_id: peer.finish_round() for peer in workers}
    outcomes = {peer: future.result(40.0) for peer, future in rounds.items()}
    for peer in others:
        assert [outcome.verdict for outcome in outcomes[peer.peer_id]] == ["retry", "commit"]
        assert set(outcomes[peer.peer_id][-1].weights) == ids(others)
    assert outcomes[broken.peer_id][-1].verdict == "resync"
    assert broken.position.lineage == others[0].position.lineage
    assert torch.equal(broken.vectors["theta"], others[0].vectors["theta"])
