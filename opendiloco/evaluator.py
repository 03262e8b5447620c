"""A worker's part in evaluating the outer parameters: its share when it is due, and the sum of all shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from opendiloco.averager import Averager
from opendiloco.compute import memory_cure
from opendiloco.config import ComputeConfig, Contract
from opendiloco.errors import SwarmError
from opendiloco.evaluate import validation_loss
from opendiloco.evaluation import EvaluationPart, is_due, perplexity, shares, total
from opendiloco.leave import Leave, wait_for
from opendiloco.metrics import EvalEvent
from opendiloco.rounds import Position
from opendiloco.separation import has_target


@dataclass(frozen=True)
class _Pending:
    """A sum that waits for the parts of others."""

    round: int
    own_tokens: int
    expected_tokens: Mapping[str, int]
    parts: Future[Mapping[str, EvaluationPart]]


class Evaluator:
    """Evaluates the outer parameters as `evaluation.every_rounds` and `evaluation.by` say."""

    def __init__(
        self,
        contract: Contract,
        batches: Sequence[Tensor],  # int64 [batch, seq_len]: the held-out sequences, the same at every worker
        swarm: Averager,
        *,
        compute: ComputeConfig,
        end_id: int | None,
        report: Callable[[EvalEvent], None],
    ) -> None:
        """Prepare to evaluate.

        Args:
            end_id: last token of each document, where documents are to be kept apart.
            report: gets this worker's numbers and, where several workers share the work, their sum.
        """
        self._config, self._last_round = contract.evaluation, contract.run.rounds
        processes = distributed.get_world_size() if distributed.is_initialized() else 1  # this one evaluates alone
        self._sequences = torch.cat(list(batches))
        self._batch_size = compute.micro_batch_size or max(1, len(batches[0]) // processes)
        self._targets = has_target(self._sequences, end_id).sum(dim=1)  # of each sequence
        self._swarm, self._compute, self._end_id, self._report = swarm, compute, end_id, report
        self._pending: list[_Pending] = []

    def evaluate(self, model: nn.Module, position: Position, *, between: Callable[[], None]) -> None:
        """Evaluate what is this worker's to evaluate of the parameters at `position`, which `model` holds.

        Args:
            between: called before each batch; what it raises ends the evaluation.
        """
        config, peer = self._config, self._swarm.peer_id
        if not is_due(position.round, every_rounds=config.every_rounds, last_round=self._last_round):
            return
        participants = position.ledger.readers
        by_whom = shares(config.by, lineage=position.lineage, participants=participants, peer=peer)
        share, count = by_whom.get(peer), len(self._sequences)
        if share is None or not share.count(count):
            return
        batches = torch.split(self._sequences[share.of_sequences(count)], self._batch_size)
        with memory_cure(batches[0], self._compute, trains=False):
            loss, tokens = validation_loss(
                model, batches, precision=self._compute.precision, end_id=self._end_id, between=between
            )
        self._tell(position.round, loss, tokens)
        if share.is_all:
            return
        of_each = {peer: int(self._targets[share.of_sequences(count)].sum()) for peer, share in by_whom.items()}
        expected = {peer: tokens for peer, tokens in of_each.items() if tokens}
        parts = self._swarm.share_evaluation(EvaluationPart(position.lineage, loss, tokens), tuple(expected))
        self._pending.append(_Pending(position.round, tokens, expected, parts))

    def report_sums(self) -> None:
        """Report the sums that have become known; does not wait."""
        for pending in [pending for pending in self._pending if pending.parts.done()]:
            self._pending.remove(pending)
            with contextlib.suppress(SwarmError):
                found = total(pending.parts.result(), pending.expected_tokens)
                if found is not None and found[1] > pending.own_tokens:
                    self._tell(pending.round, *found)

    def finish(self, leaving: Callable[[], bool]) -> None:
        """Wait for the sums that are not known yet, until they are given up or the user wants to leave."""
        for pending in self._pending:
            with contextlib.suppress(SwarmError, Leave):
                wait_for(pending.parts, leaving)
        self.report_sums()

    def _tell(self, round: int, loss: float, tokens: int) -> None:
        self._report(EvalEvent(round=round, loss=loss, perplexity=perplexity(loss), tokens=tokens))
