"""What is written down of the inner steps of a phase: metrics, the line on the terminal, at times one in the log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from opendiloco.config import LogConfig
from opendiloco.display import Display
from opendiloco.inner import InnerStepResult
from opendiloco.logs import NamedLogger
from opendiloco.metrics import InnerStepEvent, MetricsLog

LINE_S = 60.0
"""Between two lines of the log where a phase takes longer."""


class PhaseLog:
    """The steps since the phase began: their loss and their speed, and who hears of them."""

    def __init__(
        self,
        metrics: MetricsLog,
        config: LogConfig,
        logger: NamedLogger,
        *,
        inner_steps: int,
        display: Display | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._config, self._logger = metrics, config, logger
        self._inner_steps, self._display, self._clock = inner_steps, display, clock
        self._losses: list[float] = []
        self.begin()

    def begin(self) -> None:
        """The phase, or what is left of it, begins now."""
        self._losses.clear()
        self._began = self._told = self._clock()

    @property
    def loss(self) -> float:
        """Mean over the steps; NaN without any."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def step(
        self, result: InnerStepResult, *, lr: float, round: int, number: int, global_step: int, tokens_seen: int
    ) -> None:
        """One step is done. Args: `number` is that of the step in its round, from 1."""
        self._losses.append(result.loss)
        now = self._clock()
        tokens_per_s = result.tokens * len(self._losses) / max(now - self._began, 1e-9)
        if self._display is not None:
            self._display.inner_step(round, number, loss=result.loss, tokens_per_s=tokens_per_s)
        if number % self._config.every_steps == 0:
            self._metrics.write(
                InnerStepEvent(
                    round=round,
                    inner_step=number,
                    global_inner_step=global_step,
                    loss=result.loss,
                    lr=lr,
                    grad_norm=result.grad_norm,
                    tokens_seen=tokens_seen,
                    tokens_per_s=tokens_per_s,
                )
            )
        if now - self._told >= LINE_S:
            self._told = now
            self._logger.info(
                "round %d: inner step %d of %d | loss %.3f | %s tokens/s",
                round + 1,
                number,
                self._inner_steps,
                result.loss,
                f"{tokens_per_s:,.0f}",
            )
