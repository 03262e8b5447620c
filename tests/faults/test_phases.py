"""A peer that dies in any phase of a round: the others commit that round, hold the same bits, and it can come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.injector import PHASES, inject

from opendiloco.outer import params_hash

if TYPE_CHECKING:
    from support.peers import Network, Peer
    from support.waiting import WaitUntil

SIZE = 50_000


def play(workers: list[Peer]) -> None:
    for peer in workers:
        peer.vectors["pseudo_gradient"].normal_()
    for future in [peer.finish_round() for peer in workers]:
        future.result(30)


@pytest.mark.parametrize("phase", PHASES)
def test_others_commit_the_round_in_which_a_peer_dies(network: Network, phase: str, wait_until: WaitUntil) -> None:
    settings = {"heartbeat_s": 0.5, "expiry_s": 4.0}
    workers = network.workers(3, size=SIZE, failure_timeout_s=2.0, settings=settings)
    *survivors, victim = workers
    play(workers)
    struck: list[str] = []

    def kill() -> None:
        struck.append(phase)
        victim.daemon.kill()

    inject(victim, round=2, phase=phase, fault=kill)
    for peer in workers:
        peer.vectors["pseudo_gradient"].normal_()
    rounds = [peer.finish_round() for peer in workers]
    for future in rounds[:2]:
        future.result(30)
    wait_until(lambda: struck == [phase], "the victim has come to that phase")
    assert {peer.position.round for peer in survivors} == {2}
    assert len({(peer.position.lineage, params_hash(peer.state)) for peer in survivors}) == 1
    rounds[2].cancel()
    victim.close()
    play(survivors)

    again = network.peer(survivors[0].addresses, **settings).open()
    again.enter(network.contract(3, failure_timeout_s=2.0), size=SIZE)
    again.position = network.run(again.process.catch_up()).position
    assert again.position.lineage == survivors[0].position.lineage
    assert params_hash(again.state) == params_hash(survivors[0].state)
