"""Faults while a group gathers: who missed somebody once meets them later."""

from __future__ import annotations

from concurrent.futures import TimeoutError as NotDone
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.links import Links
    from support.peers import Network

pytestmark = pytest.mark.timing

MEET_S = 15.0


def test_two_workers_that_could_not_reach_each_other_when_they_arrived_still_form_a_group(
    network: Network, links: Links
) -> None:
    """Each leads a lobby of its own, and neither is a quorum."""
    hosts = [links.host() for _ in range(2)]
    first = network.peer(**hosts[0].settings).open()
    second = network.peer(first.addresses, **hosts[1].settings).open()
    workers = [first, second]
    network.enter(workers, network.contract(2, failure_timeout_s=1.0, grace=3600.0), size=1000)
    links.cut(*hosts)
    rounds = [peer.finish_round() for peer in workers]
    for future in rounds:
        with pytest.raises(NotDone):
            future.result(2.0)
    links.mend(*hosts)
    outcomes = [future.result(MEET_S)[-1] for future in rounds]
    assert [outcome.verdict for outcome in outcomes] == ["commit", "commit"]
    assert all(set(outcome.weights) == {peer.peer_id for peer in workers} for outcome in outcomes)
