"""What can happen to a peer in the middle of an all-reduce, over links as slow as a home's: the others commit.

Each fault strikes once the victim has moved a part of its bytes, so that some have its values and others do not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from opendiloco.outer import params_hash

if TYPE_CHECKING:
    from support.links import Host, Links
    from support.peers import Network, Peer
    from support.waiting import WaitUntil

pytestmark = pytest.mark.timing

SIZE = 500_000
MBIT = 1e6 / 8
SILENCE_S = 3.0
SURVIVED_S = 10.0
NOTICED_S = {"killed": 0.0, "cut off": 0.0, "frozen": 2 * SILENCE_S, "silent": 2 * SILENCE_S}
"""Silence is noticed twice: in the all-reduce, and by the question whether the silent one has committed."""


@dataclass
class Swarm:
    """Four workers behind links of 20 Mbit/s, which have done their first round."""

    workers: list[Peer]
    hosts: list[Host]

    @property
    def victim(self) -> Peer:
        return self.workers[-1]

    @property
    def survivors(self) -> list[Peer]:
        return self.workers[:-1]


@pytest.fixture
def swarm(network: Network, links: Links) -> Iterator[Swarm]:
    hosts = [links.host(rate=20 * MBIT) for _ in range(4)]
    first = network.peer(**hosts[0].settings).open()
    others = [network.peer(first.addresses, **host.settings) for host in hosts[1:]]
    workers = [first, *(peer.open() for peer in others)]
    network.enter(workers, network.contract(4, failure_timeout_s=SILENCE_S), size=SIZE)
    for peer in workers:
        peer.vectors["pseudo_gradient"].normal_()
    for outcomes in [future.result(60) for future in [peer.finish_round() for peer in workers]]:
        assert [outcome.verdict for outcome in outcomes] == ["commit"]
    yield Swarm(workers, hosts)
    links.mend(hosts[-1], *hosts[:-1])
    hosts[-1].is_stalled = False


def kill(swarm: Swarm, links: Links) -> None:
    swarm.victim.daemon.kill()


def freeze(swarm: Swarm, links: Links) -> None:
    swarm.victim.daemon.send_signal(signal.SIGSTOP)


def cut(swarm: Swarm, links: Links) -> None:
    links.cut(swarm.hosts[-1], *swarm.hosts[:-1])


def stall(swarm: Swarm, links: Links) -> None:
    swarm.hosts[-1].is_stalled = True


def drop_connections(swarm: Swarm, links: Links) -> None:
    links.drop_connections(swarm.hosts[-1])


FAULTS = [kill, cut, freeze, stall]


def strike(swarm: Swarm, links: Links, fault: Callable[[Swarm, Links], None], wait_until: WaitUntil) -> float:
    """Let the fault happen in the middle of the victim's all-reduce; returns when."""
    before = swarm.hosts[-1].carried_bytes
    wait_until(lambda: swarm.hosts[-1].carried_bytes > before + SIZE // 2, "the victim has sent a part of its values")
    fault(swarm, links)
    return time.monotonic()


@pytest.mark.parametrize(("fault", "name"), list(zip(FAULTS, NOTICED_S, strict=True)), ids=NOTICED_S)
def test_survivors_commit_with_the_weights_of_those_who_contributed(
    swarm: Swarm, links: Links, fault: Callable[[Swarm, Links], None], name: str, wait_until: WaitUntil
) -> None:
    rounds = [peer.finish_round() for peer in swarm.survivors]
    swarm.victim.finish_round()
    struck = strike(swarm, links, fault, wait_until)
    last = [future.result(60)[-1] for future in rounds]
    assert time.monotonic() - struck < SURVIVED_S + NOTICED_S[name]
    assert {peer.position.round for peer in swarm.survivors} == {2}
    assert len({peer.position.lineage for peer in swarm.survivors}) == 1
    assert len({params_hash(peer.state) for peer in swarm.survivors}) == 1
    survivors = {peer.peer_id for peer in swarm.survivors}
    committed = [set(outcome.weights) for outcome in last if outcome.verdict == "commit"]
    assert committed
    assert all(members in (survivors, survivors | {swarm.victim.peer_id}) for members in committed)
    assert all(recovery.has_own_work for peer in swarm.survivors for recovery in peer.recoveries)


@pytest.mark.parametrize("fault", [cut, stall, drop_connections], ids=["cut off", "silent", "all connections lost"])
def test_victim_is_back_with_the_bits_of_the_others_when_its_link_is(
    swarm: Swarm, links: Links, fault: Callable[[Swarm, Links], None], wait_until: WaitUntil
) -> None:
    rounds = [peer.finish_round() for peer in swarm.workers]
    strike(swarm, links, fault, wait_until)
    committed = [set(future.result(60)[-1].weights) for future in rounds[:-1]]
    links.mend(swarm.hosts[-1], *swarm.hosts[:-1])
    swarm.hosts[-1].is_stalled = False
    rounds[-1].result(60)
    for peer in swarm.workers:
        assert {recovery.has_own_work for recovery in peer.recoveries} <= {peer.peer_id in set().union(*committed)}
    assert {peer.position.lineage for peer in swarm.workers} == {swarm.survivors[0].position.lineage}
    assert len({params_hash(peer.state) for peer in swarm.workers}) == 1
    everybody = {peer.peer_id for peer in swarm.workers}
    wait_until(lambda: all(peer.candidates == everybody for peer in swarm.workers), "all expect the victim again")
    for peer in swarm.workers:
        peer.vectors["pseudo_gradient"].normal_()
    last = [future.result(60)[-1] for future in [peer.finish_round() for peer in swarm.workers]]
    assert [outcome.verdict for outcome in last] == ["commit"] * 4
    assert {len(outcome.weights) for outcome in last} == {4}
    assert all(torch.equal(peer.vectors["theta"], swarm.victim.vectors["theta"]) for peer in swarm.workers)
