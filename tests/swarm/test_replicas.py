"""One model: whatever the codec, the size and the weights, all participants hold the same bits after every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from opendiloco.codec import NonFiniteError
from opendiloco.config import OuterConfig
from opendiloco.outer import OuterState, outer_step, params_hash

if TYPE_CHECKING:
    from support.peers import Network

ROUNDS = 8
WEIGHTS = (1.0, 2.5, 1000.0)
TOLERANCE = {"none": 1e-6, "fp16": 1e-3, "int8": 2e-2}  # relative L2: lossy twice, on the way and back


@pytest.mark.parametrize(
    ("codec", "size"), [("none", 300_000), ("fp16", 300_000), ("int8", 300_000), ("int8", 4097), ("int8", 0)]
)
def test_replicas_stay_bit_identical_and_follow_the_weighted_mean(network: Network, codec: str, size: int) -> None:
    workers = network.workers(len(WEIGHTS), codec=codec, size=size)
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=draw)
    replicas = [OuterState(start.clone(), torch.zeros(size)) for _ in workers]
    for _ in range(ROUNDS):
        for peer in workers:
            peer.vectors["pseudo_gradient"].normal_(generator=draw)
        gradients = [peer.vectors["pseudo_gradient"].double() for peer in workers]
        exact = sum(g * weight for g, weight in zip(gradients, WEIGHTS, strict=True)) / sum(WEIGHTS)
        outcomes = network.round(workers, WEIGHTS)
        assert len({outcome.digest for outcome in outcomes}) == 1
        expected = {peer.peer_id: weight for peer, weight in zip(workers, WEIGHTS, strict=True)}
        assert all(outcome.weights == expected for outcome in outcomes)
        error = torch.linalg.vector_norm(workers[0].vectors["average"].double() - exact)
        assert error <= TOLERANCE[codec] * torch.linalg.vector_norm(exact)
        for peer, replica in zip(workers, replicas, strict=True):
            outer_step(replica, peer.vectors["average"], OuterConfig())
        assert len({params_hash(replica) for replica in replicas}) == 1
        assert len({peer.position.lineage for peer in workers}) == 1
    assert replicas[0].round == ROUNDS
    assert size == 0 or not torch.equal(replicas[0].theta, start)


def test_the_average_follows_the_values_of_this_round_not_of_the_last_one(network: Network) -> None:
    workers = network.workers(3, codec="none")
    for value in (1.0, -2.0, 0.0, 7.0):
        for peer in workers:
            peer.vectors["pseudo_gradient"].fill_(value)
        network.round(workers)
        assert all(bool((peer.vectors["average"] == value).all()) for peer in workers)


def test_lone_worker_gets_its_own_values_through_the_codec(network: Network) -> None:
    (alone,) = network.workers(1, size=5000)
    alone.vectors["pseudo_gradient"].normal_()
    (outcome,) = network.round([alone])
    assert outcome.weights == {alone.peer_id: 1.0}
    error = torch.linalg.vector_norm(alone.vectors["average"] - alone.vectors["pseudo_gradient"])
    assert 0 < error <= 0.02 * torch.linalg.vector_norm(alone.vectors["pseudo_gradient"])


def test_value_that_is_not_finite_never_leaves_its_worker(network: Network) -> None:
    workers = network.workers(3, grace=1.0)
    workers[0].vectors["pseudo_gradient"][7] = torch.nan
    with pytest.raises(NonFiniteError):
        workers[0].average()
    outcomes = network.round(workers[1:])
    assert all(set(outcome.weights) == {peer.peer_id for peer in workers[1:]} for outcome in outcomes)
    assert all(bool(torch.isfinite(peer.vectors["average"]).all()) for peer in workers[1:])


def test_rounds_leave_no_open_handles(network: Network) -> None:
    workers = network.workers(3, size=4097)
    for _ in range(5):
        network.round(workers)
    before = psutil.Process().num_fds()
    for _ in range(25):
        network.round(workers)
    assert psutil.Process().num_fds() < before + 25
