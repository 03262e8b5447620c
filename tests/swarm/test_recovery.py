"""Recovery between real peers: whoever missed rounds, or never was there, ends with the bits of the others."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opendiloco.config import Contract, InnerConfig, OuterConfig
from opendiloco.donor import Ask
from opendiloco.errors import SwarmError
from opendiloco.outer import OuterState, outer_step, params_hash
from opendiloco.phase import PhaseReport
from opendiloco.rounds import Position, Recovery
from opendiloco.wire import Stream

if TYPE_CHECKING:
    from support.peers import Network, Peer
    from support.waiting import WaitUntil

SIZE = 300_001
ZERO = "0" * 64
STATE = ("theta", "momentum")


def state_of(peer: Peer) -> OuterState:
    vectors = peer.vectors
    return OuterState(vectors["theta"], vectors["momentum"], vectors["second_moment"], round=peer.position.round)


def play_rounds(network: Network, workers: list[Peer], count: int) -> None:
    """Rounds as trainers do them: random pseudo-gradients, the outer step, the hash of what it gives."""
    for round in range(count):
        generator = torch.Generator().manual_seed(round)
        for peer in workers:
            peer.vectors["pseudo_gradient"].normal_(generator=generator)
        futures = [peer.average() for peer in workers]
        for peer, future in zip(workers, futures, strict=True):
            outcome = future.result(30)
            assert outcome.verdict == "commit", outcome
            state = state_of(peer)
            outer_step(state, peer.vectors["average"], OuterConfig())
            peer.commit(outcome)
            network.run(peer.process.set_params_hash(peer.position.round, params_hash(state)))


def join(network: Network, workers: list[Peer]) -> tuple[Peer, Future[Any]]:
    """A worker that begins from nothing, on its way to the others."""
    newcomer = network.peers(1, workers[0].addresses)[0]
    contract = network.contract(2)
    newcomer.enter(contract, size=SIZE, position=Position(0, ZERO, ZERO))
    return newcomer, network.start(newcomer.process.catch_up())


def check_identical(newcomer: Peer, worker: Peer, recovery: Recovery) -> None:
    for name in ("theta", "momentum"):
        assert torch.equal(newcomer.vectors[name], worker.vectors[name])
    assert (recovery.position.round, recovery.position.lineage) == (worker.position.round, worker.position.lineage)
    assert recovery.position.tokens == worker.position.tokens


def test_a_few_missed_rounds_are_replayed_from_the_log(network: Network) -> None:
    workers = network.workers(2, contract=network.contract(2), size=SIZE)
    play_rounds(network, workers, 3)
    newcomer, recovering = join(network, workers)
    recovery = recovering.result(30)
    check_identical(newcomer, workers[0], recovery)
    assert (recovery.rounds_replayed, recovery.full_state) == (3, False)
    assert recovery.received_bytes < 4 * 1.1 * SIZE


def test_a_joiner_fetches_the_state_from_several_donors_when_that_is_less(network: Network) -> None:
    workers = network.workers(2, contract=network.contract(2), size=SIZE)
    play_rounds(network, workers, 10)
    newcomer, recovering = join(network, workers)
    recovery = recovering.result(30)
    check_identical(newcomer, workers[0], recovery)
    assert recovery.full_state
    assert set(recovery.donors) <= {peer.peer_id for peer in workers}
    assert recovery.received_bytes < 8 * 1.1 * SIZE


def test_a_joiner_takes_part_in_the_next_round(network: Network, wait_until: WaitUntil) -> None:
    workers = network.workers(2, contract=network.contract(2), size=SIZE)
    play_rounds(network, workers, 2)
    newcomer, recovering = join(network, workers)
    newcomer.position = recovering.result(30).position
    network.run(newcomer.process.begin_phase(False, 0))
    wait_until(lambda: all(peer.awaits(newcomer) for peer in workers), "the others know where it is")
    play_rounds(network, [*workers, newcomer], 1)
    assert torch.equal(newcomer.vectors["theta"], workers[0].vectors["theta"])
    assert newcomer.position == workers[0].position


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_worker_that_comes_to_where_the_swarm_stands_begins_where_the_others_are(
    network: Network, wait_until: WaitUntil, rounds: int
) -> None:
    contract = Contract.model_validate({"outer": {"weighting": "tokens"}, "rounds": {"deadline": 60.0}})
    workers = network.workers(2, contract=contract, size=SIZE)
    play_rounds(network, workers, rounds)
    for peer, steps in zip(workers, (30, 32), strict=True):
        network.run(peer.process.report(PhaseReport(steps=steps, tokens_per_s=1.0, finish_in_s=20.0)))
    back = network.peers(1, workers[0].addresses)[0]
    back.enter(contract, size=SIZE, position=workers[0].position)
    wait_until(lambda: back.sees() == {peer.peer_id for peer in workers}, "it sees the others")
    recovery = network.run(back.process.catch_up())
    assert recovery.position.lineage == workers[0].position.lineage
    assert recovery.inner_step == 30
    assert recovery.phase_s == pytest.approx(40, abs=10)


def test_a_newcomer_that_sees_the_others_late_does_not_wait_for_the_first_round(network: Network) -> None:
    workers = network.workers(2, contract=network.contract(2), size=SIZE)
    play_rounds(network, workers, 3)
    newcomer = network.peers(1, workers[0].addresses)[0]
    newcomer.enter(network.contract(2), size=SIZE, position=Position(0, ZERO, ZERO))
    assert newcomer.wait_for_start() == 0


def test_a_state_with_another_hash_than_the_swarm_announced_is_never_used(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.recovery.PAUSE_S", 0.1)
    workers = network.workers(2, contract=network.contract(2), size=SIZE)
    play_rounds(network, workers, 10)
    for peer in workers:
        network.run(peer.process.set_params_hash(peer.position.round, "f" * 64))
    _, recovering = join(network, workers)
    with pytest.raises(SwarmError, match="another hash than the swarm announced"):
        recovering.result(60)


def test_a_donor_that_goes_away_is_replaced_by_another_one(network: Network) -> None:
    workers = network.workers(3, contract=network.contract(3), size=SIZE)
    play_rounds(network, workers, 10)
    workers[2].close()  # without a word: its record still names it as a donor
    newcomer, recovering = join_three(network, workers)
    recovery = recovering.result(60)
    check_identical(newcomer, workers[0], recovery)
    assert workers[2].peer_id not in recovery.donors


@pytest.mark.parametrize("chunks", [0, 1, 3], ids=["no chunk", "one chunk", "three chunks"])
def test_a_worker_whose_donors_die_goes_on_with_the_state_that_it_had(
    network: Network, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    monkeypatch.setattr("opendiloco.recovery.PAUSE_S", 0.2)
    timing = {"heartbeat_s": 0.5, "expiry_s": 3.0}
    workers = network.workers(2, contract=network.contract(2), size=SIZE, settings=timing)
    play_rounds(network, workers, 2)
    position = workers[0].position
    before = {name: workers[0].vectors[name].clone() for name in STATE}
    play_rounds(network, workers, 10)  # more than are cheaper to replay
    back = network.peer(workers[0].addresses, **timing).open()
    back.enter(network.contract(2), size=SIZE, position=position)
    for name in STATE:
        back.vectors[name].copy_(before[name])
    fetched = give_no_more_than(chunks, workers)
    recovering = network.start(back.process.catch_up())
    fetched.result(30)
    for peer in workers:
        peer.close()  # without a word: their records still name them as donors
    recovery = recovering.result(30)
    assert recovery == Recovery(replace(position, params_hash=""), received_bytes=recovery.received_bytes)
    assert all(torch.equal(back.vectors[name], before[name]) for name in STATE)
    back.position = position
    network.run(back.process.begin_phase(False, 0))
    play_rounds(network, [back], 1)


def test_a_newcomer_whose_donors_die_never_begins_with_a_part_of_their_state(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.recovery.PAUSE_S", 1.0)
    timing = {"heartbeat_s": 0.5, "expiry_s": 3.0}
    workers = network.workers(2, contract=network.contract(2), size=SIZE, settings=timing)
    play_rounds(network, workers, 10)
    newcomer = network.peer(workers[0].addresses, **timing).open()
    newcomer.enter(network.contract(2), size=SIZE, position=Position(0, ZERO, ZERO))
    fetched = give_no_more_than(1, workers)
    recovering = network.start(newcomer.process.catch_up())
    fetched.result(30)
    for peer in workers:
        peer.close()
    with pytest.raises(SwarmError, match="the state of the run could not be fetched"):
        recovering.result(60)


@pytest.mark.parametrize("is_same_lineage", [False, True], ids=["a lineage of its own", "that of the others"])
def test_a_claim_that_nobody_can_fetch_is_passed_over(
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_until: WaitUntil,
    is_same_lineage: bool,
) -> None:
    monkeypatch.setattr("opendiloco.recovery.PAUSE_S", 0.2)
    timing = {"heartbeat_s": 0.5, "expiry_s": 2.0}
    workers = network.workers(2, contract=network.contract(2), size=SIZE, settings=timing)
    play_rounds(network, workers, 2)
    liar = network.peer(workers[0].addresses, heartbeat_s=5.0, expiry_s=200.0).open()
    membership, honest = liar.process._membership, workers[0].process._presence._own
    lie = {"round": 2**40, "committed_tokens": 2**60} | ({} if is_same_lineage else {"lineage": "9" * 64})
    membership.run_id = "test"
    assert network.run(membership.announce(honest.model_copy(update=lie)))
    wait_until(lambda: all(peer.process._presence.ahead() is not None for peer in workers), "they believe it")

    recoveries = [network.start(peer.process.catch_up()) for peer in workers]
    for peer, recovery in zip(workers, recoveries, strict=True):
        assert recovery.result(60).position == replace(peer.position, params_hash="")
    assert f"could not be fetched (every donor failed before all chunks were there): {liar.peer_id}" in caplog.text
    play_rounds(network, workers, 1)

    newcomer, joining = join(network, workers)
    assert joining.result(60).position.lineage == workers[0].position.lineage
    assert torch.equal(newcomer.vectors["theta"], workers[0].vectors["theta"])


@pytest.mark.parametrize("liar", [0, 1, 2])
def test_a_donor_whose_state_is_not_what_it_announced_is_found_out(
    network: Network, monkeypatch: pytest.MonkeyPatch, liar: int
) -> None:
    monkeypatch.setattr("opendiloco.recovery.PAUSE_S", 0.2)
    workers = network.workers(3, contract=network.contract(2), size=SIZE)
    play_rounds(network, workers, 10)  # more than are cheaper to replay
    workers[liar].vectors["theta"].add_(1.0)
    newcomer, joining = join(network, workers)
    recovery = joining.result(60)
    assert recovery.full_state
    honest = workers[liar - 1]
    assert all(torch.equal(newcomer.vectors[name], honest.vectors[name]) for name in STATE)
    assert len(recovery.donors) == 1


def give_no_more_than(chunks: int, donors: list[Peer]) -> Future[None]:
    """Donors that fall silent after so many chunks of all of them; the result comes with the first one too many."""
    left, asked = [chunks], Future[None]()
    for peer in donors:
        donor = peer.process._donor
        send = donor._send_chunk

        async def send_while_any(ask: Ask, stream: Stream, send: Any = send) -> None:
            left[0] -= 1
            if left[0] < 0:
                if not asked.done():
                    asked.set_result(None)
                await asyncio.Event().wait()
            await send(ask, stream)

        donor._send_chunk = send_while_any  # type: ignore[method-assign]
    return asked


def join_three(network: Network, workers: list[Peer]) -> tuple[Peer, Future[Any]]:
    newcomer = network.peers(1, workers[0].addresses)[0]
    newcomer.enter(network.contract(3), size=SIZE, position=Position(0, ZERO, ZERO))
    return newcomer, network.start(newcomer.process.catch_up())


def test_a_joiner_gets_the_moments_of_a_donor_where_the_contract_says_so(network: Network) -> None:
    contract = network.contract(2).model_copy(update={"inner": InnerConfig(joiner_moments="donor")})
    workers = network.workers(2, contract=contract, size=SIZE)
    for index, peer in enumerate(workers):
        peer.vectors["inner_first"].fill_(-1.0 - index)
        peer.vectors["inner_second"].fill_(1.0 + index)
    play_rounds(network, workers, 20)  # more than are cheaper to replay
    newcomer = network.peers(1, workers[0].addresses)[0]
    newcomer.enter(contract, size=SIZE, position=Position(0, ZERO, ZERO))
    recovery = network.run(newcomer.process.catch_up())
    check_identical(newcomer, workers[0], recovery)
    first, second = newcomer.vectors["inner_first"], newcomer.vectors["inner_second"]
    assert set(first.tolist()) <= {-1.0, -2.0}
    assert torch.equal(first, -second)  # both of one donor, wherever they come from


def test_a_round_that_others_have_but_not_announced_yet_is_fetched_from_them(network: Network) -> None:
    """Between its commit and its record a worker has done the outer step; who failed meanwhile must not miss it."""
    workers = network.workers(3, grace=0.5, size=SIZE)
    for peer in workers[:2]:
        peer.vectors["pseudo_gradient"].normal_()
    outcomes = [future.result(30) for future in [peer.average() for peer in workers[:2]]]
    late = workers[2]
    late.process._participation.committed_by = [peer.peer_id for peer in workers[:2]]
    recovery = network.run(late.process.catch_up())
    assert (recovery.position.round, recovery.position.lineage) == (1, outcomes[0].lineage)
    state = state_of(workers[0])
    outer_step(state, workers[0].vectors["average"], OuterConfig())
    assert torch.equal(late.vectors["theta"], state.theta)


def test_donors_in_the_middle_of_an_all_reduce_give_the_rounds_before_it(network: Network) -> None:
    workers = network.workers(2, contract=network.contract(2), size=SIZE)
    play_rounds(network, workers, 3)
    newcomer, recovering = join(network, workers)
    with contextlib.ExitStack() as reducing:
        for peer in workers:
            reducing.enter_context(peer.process._donor.in_all_reduce(4))
        check_identical(newcomer, workers[0], recovering.result(30))


def test_chunks_wait_for_the_end_of_an_all_reduce_and_the_joiner_for_them(network: Network) -> None:
    workers = network.workers(2, contract=network.contract(2, failure_timeout_s=1.0), size=SIZE)
    play_rounds(network, workers, 10)
    with contextlib.ExitStack() as reducing:
        for peer in workers:
            reducing.enter_context(peer.process._donor.in_all_reduce(11))
        newcomer = network.peers(1, workers[0].addresses)[0]
        contract = network.contract(2, failure_timeout_s=1.0)
        newcomer.enter(contract, size=SIZE, position=Position(0, ZERO, ZERO))
        recovering = network.start(newcomer.process.catch_up())
        with pytest.raises(NotDone):
            recovering.result(3.0)  # three times as long as silence may be
        assert not newcomer.vectors["theta"].any()
        line = "this worker catches up: the swarm is at round 10, its own state is of round 0, 0.0 MB have been fetched"
        assert newcomer.awaited() == line
    recovery = recovering.result(30)
    assert recovery.full_state
    check_identical(newcomer, workers[0], recovery)
