"""Shards of the text on a real DHT: leases are seen by all, end with their worker, and newcomers know what was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opendiloco.ledger import Reading
from opendiloco.outer import params_hash
from opendiloco.rounds import Position

if TYPE_CHECKING:
    from support.peers import Network, Peer
    from support.waiting import WaitUntil

ZERO = "0" * 64


def read_a_round(workers: list[Peer], shards: dict[str, Reading], sequences: int) -> None:
    """All read so far in their shards and commit a round."""
    places = {peer: Reading(shard=reading.shard, sequences=sequences) for peer, reading in shards.items()}
    futures = [peer.average(readings=(places[peer.peer_id],)) for peer in workers]
    for peer, future in zip(workers, futures, strict=True):
        peer.commit(future.result(30))


def test_workers_lease_different_shards_and_a_newcomer_another_one(network: Network, wait_until: WaitUntil) -> None:
    workers = network.workers(3)
    leased = [peer.lease(None).shard for peer in workers]
    assert sorted(leased) == [0, 1, 2]
    newcomer = network.peer(workers[0].addresses).open()
    network.enter([newcomer], network.contract(3))
    wait_until(lambda: sorted(newcomer.leased_by_others()) == [0, 1, 2], "it sees the leases")
    assert newcomer.lease(None).shard not in leased


def test_the_lease_of_a_worker_that_died_is_taken_over_where_the_last_round_left_it(
    network: Network, wait_until: WaitUntil
) -> None:
    workers = network.workers(3, grace=1.0, settings={"heartbeat_s": 0.5, "expiry_s": 3.0})
    shards = {peer.peer_id: peer.lease(None) for peer in workers}
    read_a_round(workers, shards, sequences=7)
    dead, living = workers[2], workers[:2]
    dead.close()
    wait_until(lambda: not any(peer.awaits(dead) for peer in living), "its record has expired")
    read_a_round(living, shards, sequences=9)
    ends = {peer.peer_id: Reading(shard=shards[peer.peer_id].shard, sequences=12, done=True) for peer in living}
    left = Reading(shard=shards[dead.peer_id].shard, sequences=7)
    assert left in [peer.lease(ends[peer.peer_id]) for peer in living]


def test_two_that_leased_one_shard_unseen_part_at_their_next_look(network: Network, wait_until: WaitUntil) -> None:
    workers = network.workers(2)
    same = Reading(shard=0, sequences=3)
    assert [peer.lease(same) for peer in workers] == [same, same]
    wait_until(lambda: all(peer.leased_by_others() == [0] for peer in workers), "they have seen each other")
    assert sorted(peer.lease(same).shard == 0 for peer in workers) == [False, True]


def test_a_newcomer_knows_how_far_the_text_was_read_by_log_and_by_state(network: Network) -> None:
    contract = network.contract(2)
    workers = network.workers(2, contract=contract, size=100_000)
    shards = {peer.peer_id: peer.lease(None) for peer in workers}
    for rounds in (2, 20):  # the second one is more than is cheaper to replay
        for sequences in range(rounds):
            read_a_round(workers, shards, sequences)
        for peer in workers:
            network.run(peer.process.set_params_hash(peer.position.round, params_hash(peer.state)))
        newcomer = network.peer(workers[0].addresses).open()
        newcomer.enter(contract, size=100_000, position=Position(0, ZERO, ZERO))
        recovery = network.run(newcomer.process.catch_up())
        assert recovery.full_state == (rounds == 20)
        assert recovery.position.ledger == workers[0].position.ledger
        newcomer.leave()
