"""A replica, its data and its optimizer in a run: H inner steps a round, and what is written down about them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from opendiloco.averager import Averager
from opendiloco.card import model_files
from opendiloco.checkpoint import Checkpoint, CheckpointWriter, copy_to_host
from opendiloco.claims import MAX_LOSS, ToldEvaluation, ToldLoss
from opendiloco.diloco import BAD_NUMBERS_CURE, DiLoCo
from opendiloco.display import Display, evaluation_line, round_line
from opendiloco.errors import SwarmError
from opendiloco.evaluator import Evaluator
from opendiloco.flat import trainable_parameters
from opendiloco.inner import InnerStepResult, learning_rate
from opendiloco.leave import Leave
from opendiloco.logs import NamedLogger
from opendiloco.metrics import EvalEvent, JoinEvent, LeaveEvent, MetricsLog, WarningEvent
from opendiloco.model import count_parameters, describe_size, save_model
from opendiloco.phaselog import PhaseLog
from opendiloco.ranks import Prepare, Ranks, Step, TakeOptimizer, TakeParameters, check_batch
from opendiloco.replica import build_replica
from opendiloco.report import RoundReport, catch_up_event, catch_up_line, round_event
from opendiloco.rounds import Recovery
from opendiloco.settings import Settings
from opendiloco.tokenizer import load_tokenizer
from opendiloco.tokens import open_text

logger = logging.getLogger(__name__)


class Worker:
    """A replica, its data and its optimizer in a run. `swarm` is the real one, or a simulated one."""

    def __init__(
        self,
        settings: Settings,
        swarm: Averager,
        metrics: MetricsLog,
        *,
        name: str = "",
        ranks: Ranks | None = None,
        leaving: Callable[[], bool] = lambda: False,
        display: Display | None = None,
        checkpoint: Checkpoint | None = None,
        writer: CheckpointWriter | None = None,
    ) -> None:
        """Build everything and enter the run.

        Args:
            name: what its log lines begin with, where it is not alone in its process.
            ranks: this worker's processes, of which this is the first.
            checkpoint: where to go on.
            writer: takes this worker's checkpoints.
        """
        started = time.monotonic()
        self.contract, self._compute = settings.contract, settings.peer.compute
        self._metrics, self._leaving, self._display = metrics, leaving, display
        self._swarm, self._logger, self._ranks = swarm, NamedLogger(logger, name), ranks or Ranks()
        contract = self.contract
        check_batch(contract, self._ranks)
        self._ranks.open(leaving)  # before what may take long: the others wait for orders as long as it takes
        self.tokenizer = load_tokenizer(contract.data.tokenizer)
        seed, batch_size = contract.run.seed, contract.inner.batch_size
        self._stream, validation = open_text(
            contract.data, self.tokenizer, seed=seed, batch_size=batch_size, lease=swarm.lease, leaving=leaving
        )
        end_id = self.tokenizer.end_id if contract.data.separate_documents else None
        vocab_size = self.tokenizer.vocab_size
        self._ranks.give(Prepare(contract, self._compute, vocab_size, end_id))
        self._replica = build_replica(
            contract, self._compute, vocab_size=vocab_size, end_id=end_id, ranks=self._ranks, leaving=leaving
        )
        self._leave_if_asked()  # before others count on it
        self.model = self._replica.model
        self._evaluator = Evaluator(
            contract, validation, swarm, compute=self._compute, end_id=end_id, report=self._report_evaluation
        )
        self._reports: list[RoundReport] = []
        self._moves: list[Recovery] = []
        self._phase = PhaseLog(
            metrics, settings.peer.log, self._logger, inner_steps=contract.inner.steps, display=display
        )
        self._has_warned_of_shards = False
        self._resumed = checkpoint is not None
        self._every_rounds, self._writer = settings.peer.checkpoint.every_rounds, writer
        if checkpoint is not None:
            self._replica.steps.restore(self._replica.inner, checkpoint.inner)
            self._ranks.give(TakeOptimizer(checkpoint.inner))
            self._stream.load_state_dict(checkpoint.data)
            torch.set_rng_state(checkpoint.random)
        self.optimizer = DiLoCo(
            self._replica.inner,
            self.model,
            swarm,
            contract,
            start=(checkpoint.position, checkpoint.outer) if checkpoint is not None else None,
            readings=lambda: self._stream.readings,
            on_round=self._reports.append,
            on_catch_up=self._moves.append,
            on_replace=self._hand_out_parameters,
            leaving=leaving,
        )
        self._read = self._stream.state_dict()  # how far the text is in the outer parameters
        self._checkpointed = self.optimizer.round
        self._announce_join(time.monotonic() - started)

    @property
    def begins_run(self) -> bool:
        """Whether this worker starts at round 0, with nobody who would be further."""
        return self.optimizer.round == 0 and not self.optimizer.recovery.donors

    def train(self) -> None:
        """Train until the run's last round is committed, or until the user asks to leave."""
        reason = "finished"
        try:
            self._evaluate()
            self._phase.begin()
            while self.optimizer.round < self.contract.run.rounds:
                self._leave_if_asked()
                self.step()
            self._evaluator.finish(self._leaving)
        except (Leave, SwarmError) as error:
            if isinstance(error, SwarmError) and not self._leaving():
                raise
            self._logger.info("ends before the last round%s", f": {error}" if str(error) else "")
            reason = "asked to leave"
            self._checkpoint(leaving=True)
        finally:
            self._stream.close()
            self._write_rounds()
            self.optimizer.finish()
        self.optimizer.write_outer_parameters()
        self._metrics.write(LeaveEvent(round=self.optimizer.round, reason=reason))

    def save(self, folder: Path, *, metrics: Sequence[Path] = ()) -> None:
        """Write the outer parameters as a Hugging Face folder; its card tells what `metrics` say, or this worker's."""
        position = replace(self.optimizer.position, params_hash=self.optimizer.params_hash)
        files = model_files(
            self.contract,
            position,
            parameters=count_parameters(self.model),
            metrics=metrics or [self._metrics.path],
        )
        save_model(self.model, self.tokenizer, folder, files=files)

    def _hand_out_parameters(self, moments: bool) -> None:
        if moments:
            self._ranks.give(TakeOptimizer(self._replica.steps.state_of(self._replica.inner)))
        self._ranks.give(TakeParameters())
        self._ranks.hand_out(trainable_parameters(self.model))

    def _leave_if_asked(self) -> None:
        if self._leaving():
            raise Leave

    # --- inner phase -------------------------------------------------------------------------------------

    def step(self) -> None:
        """One inner step; the last one of a round also ends the round, with its evaluation and checkpoint."""
        contract, optimizer = self.contract, self.optimizer
        round, number = optimizer.round, optimizer.phase.steps + 1
        step = round * contract.inner.steps + optimizer.phase.schedule_step
        lr = learning_rate(step, config=contract.inner, total_steps=contract.run.rounds * contract.inner.steps)
        tokens = next(self._stream)
        optimizer.count_tokens(tokens.numel())
        self._ranks.give(Step(tokens, lr))
        result = self._replica.steps.step(optimizer, tokens, lr=lr)
        if not result.finite:
            self._go_back(result, step)
            return
        seen = self._stream.tokens_seen
        self._phase.step(result, lr=lr, round=round, number=number, global_step=step, tokens_seen=seen)
        self._evaluator.report_sums()
        if self._reports:
            outcome = self._reports[-1].outcome
            self._stream.renew(reported=self._swarm.peer_id in outcome.weights)
            if self._swarm.peer_id in outcome.weights:
                self._read = self._stream.state_dict()
            self._warn_of_few_shards(outcome.live)
            self._write_rounds()
            if outcome.verdict == "commit":
                self._checkpoint()
                self._evaluate()
            self._phase.begin()

    def _go_back(self, result: InnerStepResult, step: int) -> None:
        """Bad numbers do not leave this worker: it goes on from the swarm's parameters."""
        reason = f"loss {result.loss} with gradient norm {result.grad_norm} at inner step {step}"
        self._warn(f"{reason}: this worker's part of the round is dropped ({BAD_NUMBERS_CURE})")
        self.optimizer.drop_phase(reason)
        self._phase.begin()

    def _warn(self, message: str) -> None:
        self._logger.warning(message)
        self._metrics.write(WarningEvent(message=message))

    # --- between rounds ----------------------------------------------------------------------------------

    def _write_rounds(self) -> None:
        """Metrics and log of the attempts at the round that has just ended, and of the way to where the swarm is."""
        loss = self._phase.loss
        for report in self._reports:
            if report.params_hash is None:
                self._write_round(report, loss)
            else:  # in the thread that hashes, when it is done
                report.params_hash.add_done_callback(partial(self._write_hashed_round, report, loss))
        self._reports.clear()
        for recovery in self._moves:
            self._metrics.write(catch_up_event(recovery))
            self._logger.info(catch_up_line(recovery))
        self._moves.clear()

    def _warn_of_few_shards(self, workers: int) -> None:
        if workers > self._stream.shards and not self._has_warned_of_shards:
            self._has_warned_of_shards = True
            self._warn(
                f"data.source {self._stream.scarcest.name} has {self._stream.shards} shards for {workers} workers, so "
                f"some read the same text: raise data.shards in the next run, or use more text or more files"
            )

    def _write_hashed_round(self, report: RoundReport, loss: float, _: Future[str]) -> None:
        self._write_round(report, loss)

    def _write_round(self, report: RoundReport, loss: float) -> None:
        event = round_event(report, loss=loss, codec=self.contract.outer.codec)
        self._metrics.write(event)
        if event.verdict == "commit" and math.isfinite(loss):
            self._swarm.tell(ToldLoss(round=event.round, loss=min(loss, MAX_LOSS)))
        if self._display is not None:
            self._display.round(event, live=report.outcome.live)
        has_vote = self._swarm.peer_id in event.participants
        line = round_line(event, live=report.outcome.live, reason=report.outcome.reason, has_vote=has_vote)
        self._logger.log(logging.WARNING if event.verdict in ("retry", "skip") else logging.INFO, line)

    def _evaluate(self) -> None:
        """Validation of the outer parameters, which the model holds between two rounds, as far as it is due here."""
        with self.optimizer.phase.paused():
            self._evaluator.evaluate(self.model, self.optimizer.position, between=self._leave_if_asked)

    def _report_evaluation(self, event: EvalEvent) -> None:
        self._metrics.write(event)
        if math.isfinite(event.loss):
            self._swarm.tell(ToldEvaluation(round=event.round, loss=min(event.loss, MAX_LOSS), tokens=event.tokens))
        if self._display is not None:
            self._display.evaluation(event.loss)
        self._logger.info(evaluation_line(event))

    def _checkpoint(self, *, leaving: bool = False) -> None:
        """Begin to write a checkpoint, if one is due: every few rounds, and of the last round when leaving."""
        optimizer = self.optimizer
        if self._writer is None or not self._every_rounds or optimizer.round == self._checkpointed:
            return
        if not optimizer.has_state or (optimizer.round % self._every_rounds and not leaving):
            return
        self._checkpointed = optimizer.round
        outer = optimizer.outer
        vectors = {"theta": outer.theta, "momentum": outer.momentum, "second_moment": outer.second_moment}
        self._writer.write(
            Checkpoint(
                contract=self.contract.digest,
                position=optimizer.position,
                outer={name: vector.clone() for name, vector in vectors.items() if vector.numel()},
                inner=copy_to_host(self._replica.steps.state_of(optimizer)),
                data=self._read,
                random=torch.get_rng_state(),
            )
        )

    def _announce_join(self, seconds_s: float) -> None:
        optimizer, recovery = self.optimizer, self.optimizer.recovery
        self._metrics.write(
            JoinEvent(
                round=optimizer.round,
                lineage=optimizer.outer.lineage,
                source="swarm" if recovery.donors else "checkpoint" if self._resumed else "fresh",
                donors=recovery.donors,
                received_bytes=recovery.received_bytes,
                seconds_s=seconds_s,
                params_hash=optimizer.params_hash,
            )
        )
        if recovery.donors:
            self._logger.info(
                "joined at round %d, inner step %d: %.1f MB, donors: %d, rounds replayed: %d",
                optimizer.round,
                optimizer.phase.steps,
                recovery.received_bytes / 1e6,
                len(recovery.donors),
                recovery.rounds_replayed,
            )
        self._logger.info(
            "run %s | workers: %d | %s, %s | %d rounds of %d inner steps | replica %s",
            self.contract.run.id,
            optimizer.workers,
            self.contract.model.name,
            describe_size(self.model),
            self.contract.run.rounds,
            self.contract.inner.steps,
            optimizer.params_hash[:12],
        )
