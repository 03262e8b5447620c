"""A network that tears: no half outvotes the other, and when it heals there is one model again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from opendiloco.outer import params_hash

if TYPE_CHECKING:
    from support.links import Links
    from support.peers import Network, Peer
    from support.waiting import WaitUntil

pytestmark = pytest.mark.timing

EXPIRY_S = 4.0


def play(workers: list[Peer]) -> None:
    """One round, in which every worker has numbers of its own."""
    for peer in workers:
        peer.vectors["pseudo_gradient"].normal_()
    for future in [peer.finish_round() for peer in workers]:
        future.result(60)


@pytest.mark.parametrize(("left", "right"), [(2, 2), (1, 2)], ids=["equal halves", "one alone"])
def test_two_halves_that_went_on_end_on_the_heavier_lineage_and_say_what_was_given_up(
    network: Network, links: Links, left: int, right: int, wait_until: WaitUntil
) -> None:
    count = left + right
    hosts = [links.host() for _ in range(count)]
    timing = {"heartbeat_s": 0.5, "expiry_s": EXPIRY_S}
    first = network.peer(**hosts[0].settings, **timing).open()
    others = [network.peer(first.addresses, **host.settings, **timing) for host in hosts[1:]]
    workers = [first, *(peer.open() for peer in others)]
    network.enter(workers, network.contract(count), size=5000)
    play(workers)
    lefts, rights = workers[:left], workers[left:]
    for host in hosts[:left]:
        links.cut(host, *hosts[left:])
    waiting = [peer.finish_round() for peer in lefts]  # waits until the others' records have expired
    for _ in range(3):
        play(rights)
    for future in waiting:
        assert future.result(60)[-1].verdict == "commit"
    halves = [{peer.position.lineage for peer in half} for half in (lefts, rights)]
    assert [len(half) for half in halves] == [1, 1]
    assert halves[0] != halves[1]
    for host in hosts[:left]:
        links.mend(host, *hosts[left:])
    everybody = {peer.peer_id for peer in workers}
    wait_until(lambda: all(peer.sees() == everybody - {peer.peer_id} for peer in workers), "they have met again")
    for _ in range(2):
        play(workers)
    assert len({peer.position.lineage for peer in workers}) == 1
    assert len({params_hash(peer.state) for peer in workers}) == 1
    assert [sum(recovery.given_up for recovery in peer.recoveries) for peer in workers] == [1] * left + [0] * right
    assert all(peer.position.round >= 5 for peer in workers)
