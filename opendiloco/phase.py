"""How far a worker's inner phase is: H steps, or as many as it can do in the seconds that the contract gives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opendiloco.config import Contract
from opendiloco.errors import SettingsError

REPORT_S = 1.0  # between two reports
STUCK_S = 60.0  # between two rounds: an outer step takes seconds, also of a large model
STOPPED_S, STOPPED_STEPS = 30.0, 10  # without a report: the trainer does not train
EARLY_SHARE = 0.1  # of a phase: work that begins within it counts as whole


@dataclass(frozen=True)
class PhaseReport:
    """How far an inner phase is, for others to plan with."""

    steps: int
    tokens_per_s: float
    finish_in_s: float


class InnerPhase:
    """One worker's inner phase, from `begin` to the end of the round. `clock` gives seconds."""

    def __init__(self, contract: Contract, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._deadline = contract.inner.steps, contract.rounds.deadline
        self._by_tokens = contract.outer.weighting == "tokens"
        self._clock, self._reported = clock, clock()
        self.tokens = 0
        self.begin()

    def begin(self, *, at: int = 0, since_s: float = 0.0, keeps_work: bool = False) -> None:
        """Start, where the others are, so that nobody waits for this worker.

        Args:
            at: inner steps that the others have done.
            since_s: seconds for which they have been at it.
            keeps_work: the work of a phase that ended too late counts in this one.
        """
        self.steps = self._begun_at = at
        self._begun, self._started = self._clock(), self._clock() - since_s
        self.tokens = self._kept_tokens = self.tokens if keeps_work else 0
        self.is_whole = keeps_work or self.progress <= EARLY_SHARE
        """Whether this worker brings the work of a whole phase, or nearly."""

    def drop(self) -> None:
        """What was done so far is lost; what is left of the phase counts."""
        self._begun_at, self.tokens, self._kept_tokens, self.is_whole = self.steps, 0, 0, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile is not part of the phase's `seconds`; the swarm does not wait for it, though."""
        since = self._clock()
        try:
            yield
        finally:
            self._begun += self._clock() - since

    def step(self) -> None:
        """One inner step has been done."""
        self.steps += 1

    @property
    def steps_done(self) -> int:
        """Inner steps that this worker has really done."""
        return self.steps - self._begun_at

    @property
    def seconds(self) -> float:
        """How long this worker has been at it."""
        return self._clock() - self._begun

    @property
    def progress(self) -> float:
        """Share of the phase that is over: 0 at its start, 1 at its end."""
        if self._deadline == "adaptive":
            return min(1.0, self.steps / self._steps)
        return min(1.0, (self._clock() - self._started) / self._deadline)

    @property
    def is_over(self) -> bool:
        """Whether the round shall end now."""
        return self.progress >= 1

    @property
    def schedule_step(self) -> int:
        """The step of this round, from 0 to H - 1, that the learning rate is taken for."""
        done = self.steps if self._deadline == "adaptive" else int(self.progress * self._steps)
        return min(self._steps - 1, done)

    def report(self) -> PhaseReport | None:
        """How far this worker is, if the last report is some time ago and a step has been done."""
        now = self._clock()
        if now - self._reported < REPORT_S or not self.steps_done:
            return None
        self._reported = now
        if self._deadline == "adaptive":
            left_s = (self._steps - self.steps) * self.seconds / self.steps_done
        else:
            left_s = max(0.0, self._deadline - (now - self._started))
        return PhaseReport(self.steps, (self.tokens - self._kept_tokens) / max(self.seconds, 1e-9), left_s)

    @property
    def work(self) -> int:
        """What this worker adds to the weight of the lineage: its tokens, or its steps where nobody counts tokens."""
        return self.tokens or self.steps_done

    @property
    def has_vote(self) -> bool:
        """Whether this worker's work can count: one that came in the middle has no vote where all votes are equal."""
        return self._by_tokens or self.is_whole

    @property
    def weight(self) -> float:
        """Weight of the pseudo-gradient: tokens, or one; 0 follows the round without a part in it.

        Raises:
            SettingsError: see `check_tokens`.
        """
        self.check_tokens()
        return float(self.tokens if self._by_tokens else self.has_vote)

    def check_tokens(self) -> None:
        """To be called after each step: at the end of the round it would be late to tell the user.

        Raises:
            SettingsError: outer.weighting is tokens, and nobody counted any.
        """
        if self._by_tokens and self.tokens == 0 and self.steps_done:
            raise SettingsError(
                "outer.weighting is tokens and no tokens were counted in this round: call count_tokens before "
                "each step, or set outer.weighting to uniform"
            )


class Watch:
    """Tells from its reports whether a trainer still trains: one that is suspended or hangs says nothing any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._step_s = clock, 0.0
        self.begin(0)

    def begin(self, steps: int) -> None:
        """A phase begins, with so many inner steps behind it."""
        self._steps, self._heard, self._answered = steps, self._clock(), math.inf

    def asks(self) -> None:
        """It wants a round."""
        self._answered = math.inf

    def answered(self) -> None:
        """It has what the round came to, and is to act on it."""
        self._answered = self._clock()

    def report(self, steps: int) -> None:
        """So many inner steps are done."""
        now = self._clock()
        if steps > self._steps:
            self._step_s = (now - self._heard) / (steps - self._steps)
        self._steps, self._heard = steps, now

    @property
    def has_stopped(self) -> bool:
        """Whether it has said nothing for much longer than its steps take; unknown, and so false, before the first."""
        silence_s = self._clock() - self._heard
        return self._step_s > 0 and silence_s > max(STOPPED_S, STOPPED_STEPS * self._step_s)

    @property
    def is_stuck(self) -> bool:
        """Whether it has long had what a round came to and has not acted on it."""
        return self._clock() - self._answered > STUCK_S
