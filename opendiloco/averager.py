"""The swarm as the optimizer needs it: implemented by `swarm.Swarm`, and by workers of one process in `simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from opendiloco.claims import News
from opendiloco.codec import Codec, get_codec
from opendiloco.config import Contract
from opendiloco.evaluation import EvaluationPart
from opendiloco.ledger import Reading
from opendiloco.phase import PhaseReport
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest

FP32_BYTES = 4


class Averager(Protocol):
    """One worker's membership of a swarm. The vectors `allocate` gives are where both sides exchange numbers."""

    @property
    def peer_id(self) -> str:
        """This worker's name in the lists of participants."""

    def leaving(self) -> bool:
        """Whether the user wants this worker to leave."""

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """fp32 vectors (host memory, zeros) that both sides see."""

    def enter(self, contract: Contract, layout: str, position: Position) -> None:
        """Take part in the run, with the outer state standing at `position`."""

    def catch_up(self) -> Future[Recovery]:
        """Bring theta and momentum to the head of the swarm's lineage, if that is not here."""

    def begin_phase(self, *, following: bool, steps: int) -> None:
        """Training begins, or begins again, with so many inner steps behind it.

        Args:
            following: this worker takes part from the next round on.
        """

    def wait_for_start(self) -> Future[int]:
        """Wait until the first round may start; gives the number of workers that are there, 0 to catch up again."""

    def report(self, report: PhaseReport) -> None:
        """How far this worker's inner phase is."""

    def lease(self, at: Reading | None, source: int, shards: int) -> Reading:
        """Where to read on in a source, for a worker that is at `at` (None: nowhere): there, or in another shard."""

    def average(self, request: RoundRequest) -> Future[RoundOutcome]:
        """One attempt to average the workers' encoded pseudo-gradients (`contribution`) into `average`."""

    def share_evaluation(self, part: EvaluationPart, peers: tuple[str, ...]) -> Future[Mapping[str, EvaluationPart]]:
        """Tell what this worker's part of an evaluation came to; gives the parts of `peers` that come in time."""

    def withdraw(self) -> None:
        """Give a running `average` up, unless its all-reduce has begun; then its outcome comes soon."""

    def awaited(self) -> str:
        """Whom a running `average` waits for, in words."""

    def committed(self, position: Position) -> None:
        """The outer step of a round is done; its hash follows."""

    def set_params_hash(self, round: int, params_hash: str) -> None:
        """The hash of the state after `round`."""

    def tell(self, news: News) -> None:
        """Something for those who only look at the swarm; does not wait."""


def contribution_bytes(vectors: Mapping[str, Tensor], codec: Codec) -> Tensor:
    """Where a worker's encoded pseudo-gradient is: uint8 [wire_bytes(N)]."""
    return vectors["contribution"].view(torch.uint8)[: codec.wire_bytes(vectors["average"].numel())]


def vector_sizes(numel: int, contract: Contract) -> dict[str, int]:
    """Values in each vector that a worker and its swarm share, for a model of `numel` trainable parameters."""
    second_moment = numel if contract.outer.optimizer == "adam" else 0
    inner = numel if contract.inner.joiner_moments == "donor" else 0
    return {
        "theta": numel,
        "momentum": numel,
        "second_moment": second_moment,
        "contribution": -(-get_codec(contract.outer.codec).wire_bytes(numel) // FP32_BYTES),
        "average": numel,
        "inner_first": inner,
        "inner_second": inner,
    }
