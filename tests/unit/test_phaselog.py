"""What is written down of inner steps: their speed, their mean loss, and a line of the log where a phase is long."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from opendiloco.config import LogConfig
from opendiloco.inner import InnerStepResult
from opendiloco.logs import NamedLogger
from opendiloco.metrics import MetricsLog, read_metrics
from opendiloco.phaselog import PhaseLog


class Phase:
    """A phase of steps of 10 s and 50 tokens each."""

    def __init__(self, metrics: MetricsLog) -> None:
        self.now = 100.0
        logger = NamedLogger(logging.getLogger("opendiloco.test"), "")
        config = LogConfig(every_steps=2)
        self.log = PhaseLog(metrics, config, logger, inner_steps=500, clock=lambda: self.now)

    def step(self, number: int) -> None:
        self.now += 10.0
        result = InnerStepResult(loss=float(number), grad_norm=1.0, tokens=50, finite=True)
        self.log.step(result, lr=0.1, round=3, number=number, global_step=1500 + number, tokens_seen=50 * number)


def test_steps_are_timed_and_averaged_from_where_the_phase_begins(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", "a") as metrics:
        phase = Phase(metrics)
        assert math.isnan(phase.log.loss)
        for number in (1, 2, 3):
            phase.step(number)
        assert phase.log.loss == 2.0
        phase.now += 1000.0  # an evaluation
        phase.log.begin()
        assert math.isnan(phase.log.loss)
        phase.step(4)
        assert phase.log.loss == 4.0
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [(step["inner_step"], step["global_inner_step"], step["tokens_per_s"]) for step in steps] == [
        (2, 1502, 5.0),
        (4, 1504, 5.0),
    ]


def test_a_long_phase_has_a_line_a_minute_and_a_short_one_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with MetricsLog(tmp_path / "metrics.jsonl", "a") as metrics:
        phase = Phase(metrics)
        for number in range(1, 6):
            phase.step(number)
        phase.log.begin()
        assert not caplog.messages
        for number in range(1, 14):
            phase.step(number)
    assert caplog.messages == [
        "round 4: inner step 6 of 500 | loss 6.000 | 5 tokens/s",
        "round 4: inner step 12 of 500 | loss 12.000 | 5 tokens/s",
    ]
