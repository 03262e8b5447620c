"""DiLoCo as a drop-in optimizer: every H-th step of the inner optimizer ends an outer round with the swarm.

DiLoCo, Algorithm 1, arXiv:2311.08105. The inner optimizer works on the model's parameters as always; after H steps
theta_t - theta_i is averaged with the other workers, the outer step moves theta, and the model starts from it again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from opendiloco.averager import Averager, contribution_bytes, vector_sizes
from opendiloco.codec import get_codec
from opendiloco.config import Contract
from opendiloco.contribution import Contribution
from opendiloco.errors import OpendilocoError, SwarmError
from opendiloco.flat import FlatLayout, check_parameters, gather, replica_digest, trainable_parameters, unwrapped
from opendiloco.identity import peer_seed
from opendiloco.leave import Leave, every, wait_for
from opendiloco.ledger import Reading
from opendiloco.loop import LoopOptimizer
from opendiloco.moments import load_moments, store_moments
from opendiloco.phase import InnerPhase
from opendiloco.report import RoundReport, given_up_line, log_catch_up, log_round, told_round
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.standing import Standing

PATIENCE_S = 15.0  # between two lines that say whom a round waits for
LEAVE_LIMIT_S = 7.0  # for an all-reduce that had begun when the user asked to leave
BAD_NUMBERS_CURE = "lower inner.lr (or outer.lr, if it is the first step of a round), or raise inner.warmup_steps"

T = TypeVar("T")
logger = logging.getLogger(__name__)


class DiLoCo(LoopOptimizer):
    """Wraps an inner optimizer; `step` does an inner step and, after the H-th of a round, the outer one.

    Learning-rate schedulers, clipping and gradient scalers see the inner optimizer's parameter groups. Frozen
    parameters and buffers are left alone; tied parameters count once.

    Use it in a `with` block around the training loop, which it ends in order (see `LoopOptimizer`).

    Args:
        inner: any optimizer over the trainable parameters of `model`.
        start: where to begin instead of round 0: a checkpoint's position, theta, momentum and second_moment (adam).
        readings: what this worker has read of the text that the swarm leases to it (see `Averager.lease`).
        on_round: called with every attempt at a round, from within `step`; writes a line to the log by default.
        on_catch_up: called when this worker has moved to where the swarm is, after a round with the verdict resync.
        on_replace: called when the parameters have been replaced (True: the inner optimizer's state too).
        leaving: whether the user wants to leave, instead of asking `swarm`; asked while waiting for the swarm.

    Raises:
        SettingsError: another worker of the run has another contract, model or initial parameters, or `inner` and
            `model` do not belong together.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        swarm: Averager,
        contract: Contract,
        *,
        start: tuple[Position, Mapping[str, Tensor]] | None = None,
        readings: Callable[[], tuple[Reading, ...]] = tuple,
        on_round: Callable[[RoundReport], None] = log_round,
        on_catch_up: Callable[[Recovery], None] = log_catch_up,
        on_replace: Callable[[bool], None] = lambda moments: None,
        leaving: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(inner, contract, leaving=leaving if leaving is not None else swarm.leaving)
        self._swarm, self._contract, self._on_round, self._readings = swarm, contract, on_round, readings
        self._on_catch_up, self._on_replace = on_catch_up, on_replace
        model = unwrapped(model)
        self._parameters = trainable_parameters(model)
        check_parameters(self.param_groups, self._parameters)
        self._vectors = swarm.allocate(vector_sizes(FlatLayout.of(model).numel, contract))
        gather(self._parameters, self._vectors["theta"])
        self._standing = Standing(self._vectors, contract, tell_hash=swarm.set_params_hash)
        self.outer = self._standing.outer
        codec = get_codec(contract.outer.codec)
        out = contribution_bytes(self._vectors, codec)
        self._contribution = Contribution(self._parameters, codec, self.outer.theta, out)
        self._moments = self._vectors["inner_first"], self._vectors["inner_second"]
        if start is not None:
            self._standing.start_at(*start)
            self._replace_parameters()
        self._dropped = 0
        self._followed: Future[RoundOutcome] | None = None
        self.phase = InnerPhase(contract)
        """Where in the inner phase of the current round this worker is; a joiner begins where the others are."""
        try:
            swarm.enter(contract, replica_digest(model), self._standing.hashed_position)
            self.workers = 0
            while not self.workers:  # what is there may come into sight late
                self.recovery = self._catch_up()
                self.workers = self._wait(swarm.wait_for_start())
            if not self.recovery.is_mid_phase:  # it begins now, however long this worker has waited for the others
                self.phase.begin()
            self.seed = peer_seed(swarm.peer_id, round=self.round)  # what to shuffle by from here on
        except BaseException:
            self.finish()
            raise

    @property
    def round(self) -> int:
        """Outer rounds committed."""
        return self.outer.round

    @property
    def position(self) -> Position:
        """Where this worker stands, as of the last committed round; without its hash."""
        return self._standing.position

    @property
    def global_step(self) -> int:
        """Inner steps that the swarm has behind it, from 0 to `total_steps`: what a learning rate is a function of."""
        return self.round * self._contract.inner.steps + self.phase.schedule_step

    @property
    def has_state(self) -> bool:
        """Whether the outer state is that of a round; not while, or since, catching up with the swarm broke off."""
        return self._standing.is_whole

    @property
    def params_hash(self) -> str:
        """Hash of the outer state; waits while it is being computed."""
        return self._standing.hash.result()

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        if self._followed is None and not self.phase.has_vote:
            self._followed = self._swarm.average(RoundRequest(weight=0.0, tokens=0))
        loss = self.inner.step(closure)
        self.phase.step()
        self.phase.check_tokens()
        if self.phase.is_over or (self._followed is not None and self._followed.done()):
            self._end_round()
        elif (report := self.phase.report()) is not None:
            self._swarm.report(report)
        return loss

    def drop_phase(self, reason: str) -> None:
        """Throw away what this worker did in this round, because its numbers are bad: back to the swarm's theta.

        What is left of the phase counts where weights are tokens; otherwise this worker only follows the round: it
        takes the result the moment the others have it, however far its own phase is.

        Raises:
            OpendilocoError: that has happened again and again, and the worker contributed nothing in between.
        """
        self._dropped += 1
        if self._dropped > self._contract.rounds.max_retries:
            raise OpendilocoError(f"{reason}, {self._dropped} times and no useful round between: {BAD_NUMBERS_CURE}")
        self._contribution.restart()
        self._on_replace(not self.inner.state)  # which was cleared, or stays as it is
        self.phase.drop()
        self._begin_phase()

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens of this round, which are its weight when outer.weighting is "tokens"."""
        self.phase.tokens += tokens

    def write_outer_parameters(self) -> None:
        """Put theta, the outer parameters of the last committed round, into the model; `on_replace` is not called.

        Not where there is none: the model keeps what it holds.
        """
        if self.has_state:
            self._contribution.restart()
        else:
            logger.warning("left while it was catching up with the swarm: it holds no outer parameters of any round")

    def finish(self) -> None:
        """Wait until the last round has been hashed."""
        self._standing.finish()

    def _begin_phase(self) -> None:
        self._swarm.begin_phase(following=not self.phase.has_vote, steps=self.phase.steps)

    # --- the round ---------------------------------------------------------------------------------------

    def _end_round(self) -> None:
        inner_s, norm = self.phase.seconds, self._contribution.measure()
        if not math.isfinite(norm):
            reason = "the pseudo-gradient is not finite"
            outcome = RoundOutcome(verdict="skip", reason=f"{reason}: back to the swarm's parameters")
            self._on_round(self._attempt(outcome, inner_s=inner_s, pseudo_gradient_norm=norm))
            self.inner.state.clear()  # moments that have seen such numbers would bring them back
            self.drop_phase(reason)
        else:
            self._contribution.encode()
        for _ in range(self._contract.rounds.max_retries + 1):
            outcome = self._average()
            if outcome.verdict == "commit":
                self._commit(self._attempt(outcome, inner_s=inner_s, pseudo_gradient_norm=norm))
                return
            self._on_round(self._attempt(outcome, inner_s=inner_s, pseudo_gradient_norm=norm))
            if outcome.verdict == "resync":
                self._catch_up(has_late_work=True)
                return
            if outcome.verdict == "skip":  # nobody is left to follow
                self.phase.is_whole = True
                if self.phase.steps_done == 0:
                    self.phase.begin()
                self._begin_phase()
                if not self.phase.is_over:
                    return
        raise SwarmError(
            f"round {self.round + 1} failed {self._contract.rounds.max_retries + 1} times "
            f"({outcome.reason}): start this worker again"
        )

    def _average(self) -> RoundOutcome:
        """One attempt. A request to leave withdraws from it while that can be done without harm to the others."""
        future, self._followed = self._followed, None
        if future is None:
            request = RoundRequest(weight=self.phase.weight, tokens=self.phase.work, readings=self._readings())
            future = self._swarm.average(request)
        try:
            return self._wait(future)
        except Leave:
            with contextlib.suppress(NotDone, SwarmError):
                self._swarm.withdraw()
                if (outcome := future.result(LEAVE_LIMIT_S)).verdict == "commit":
                    return outcome
            raise

    def _catch_up(self, *, has_late_work: bool = False) -> Recovery:
        """Go where the swarm is, also within its inner phase.

        Finished work that came too late goes on top of the new outer parameters.
        """
        before, keeps_work = self.position, False
        with self._standing.replaced():
            recovery = self._wait(self._swarm.catch_up())
            if recovery.position.lineage != before.lineage:
                keeps_work = self._follow(recovery, has_late_work=has_late_work)
        if recovery.position.lineage == before.lineage and has_late_work:
            return recovery  # whoever was ahead has gone
        self.phase.begin(at=recovery.inner_step, since_s=recovery.phase_s, keeps_work=keeps_work)
        self._begin_phase()
        if has_late_work:
            self._on_catch_up(recovery)
        return recovery

    def _follow(self, recovery: Recovery, *, has_late_work: bool) -> bool:
        """Take over the outer state that was recovered; returns whether late work is on top of it."""
        before = self.position
        if recovery.given_up:
            logger.warning(given_up_line(recovery, before))
        self._standing.arrive(recovery.position)
        is_new = self.phase.is_whole and not recovery.has_own_work
        is_fresh = is_new and self.round - before.round <= self._contract.rounds.max_staleness
        keeps_work = has_late_work and is_fresh
        self._replace_parameters(keep_work=keeps_work, moments=recovery.full_state)
        return keeps_work

    def _commit(self, attempt: RoundReport) -> None:
        """The outer step, on bytes that are the same at every participant."""
        outcome = attempt.outcome
        self._dropped = 0 if self.phase.weight > 0 else self._dropped
        started, average = time.monotonic(), self._vectors["average"]
        self._standing.commit(outcome, average)
        self._replace_parameters()
        store_moments(self.inner, self._parameters, *self._moments)
        try:
            self._swarm.committed(self.position)
        finally:  # it is committed, whether or not the network process is there to be told
            outer_s = time.monotonic() - started
            self._standing.announce()
            report = replace(
                attempt,
                lineage=outcome.lineage,
                params_hash=self._standing.hash,
                outer_s=outer_s,
                outer_gradient_norm=float(torch.linalg.vector_norm(average)),
            )
            self._swarm.tell(told_round(report, peer=self._swarm.peer_id))
            self._on_round(report)
            self.phase.begin()

    def _attempt(self, outcome: RoundOutcome, *, inner_s: float, pseudo_gradient_norm: float) -> RoundReport:
        """An attempt at the next round, before anything came of it."""
        return RoundReport(
            round=self.round + 1,
            outcome=outcome,
            lineage=self.outer.lineage,
            inner_steps=self.phase.steps_done,
            tokens=self.phase.tokens,
            readings=self._readings(),
            inner_s=inner_s,
            pseudo_gradient_norm=pseudo_gradient_norm,
        )

    def _wait(self, future: Future[T]) -> T:
        def say_whom_it_waits_for() -> None:
            logger.warning("round %d waits: %s", self.round + 1, self._swarm.awaited())

        return wait_for(future, self._leaving, meanwhile=every(PATIENCE_S, say_whom_it_waits_for))

    def _replace_parameters(self, *, keep_work: bool = False, moments: bool = False) -> None:
        self._contribution.restart(keep_work=keep_work)
        if moments:
            load_moments(self.inner, self._parameters, *self._moments, step=self.round * self._contract.inner.steps)
        self._on_replace(moments and self._moments[0].numel() > 0)
