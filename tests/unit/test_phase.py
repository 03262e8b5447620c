"""The inner phase: when it is over, what it weighs, and where in the learning rate's schedule it is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.config import Contract
from opendiloco.errors import SettingsError
from opendiloco.phase import STUCK_S, InnerPhase, PhaseReport, Watch


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def phase_of(
    clock: Clock, *, steps: int = 10, deadline: float | str = "adaptive", weighting: str = "tokens"
) -> InnerPhase:
    contract = Contract.model_validate(
        {"inner": {"steps": steps}, "rounds": {"deadline": deadline}, "outer": {"weighting": weighting}}
    )
    return InnerPhase(contract, clock)


@given(st.integers(1, 50), st.integers(0, 49))
def test_phase_of_h_steps_ends_after_the_step_that_makes_h_wherever_it_began(steps: int, at: int) -> None:
    phase = phase_of(Clock(), steps=steps)
    phase.begin(at=min(at, steps - 1))
    done = 0
    while not phase.is_over:
        assert phase.schedule_step == min(at, steps - 1) + done
        phase.step()
        done += 1
    assert done == phase.steps_done == steps - min(at, steps - 1)


def test_phase_of_fixed_length_ends_with_its_time_however_many_steps_were_done() -> None:
    clock = Clock()
    phase = phase_of(clock, steps=10, deadline=60.0)
    for _ in range(1000):  # a fast machine
        phase.step()
    assert not phase.is_over
    clock.now += 30
    assert (phase.progress, phase.schedule_step) == (0.5, 5)
    assert phase.report() == PhaseReport(steps=1000, tokens_per_s=0.0, finish_in_s=30.0)
    clock.now += 30
    assert phase.is_over
    assert phase.schedule_step == 9
    assert phase.steps_done == 1000


def test_joiner_of_a_phase_of_fixed_length_is_done_with_the_others() -> None:
    clock = Clock()
    phase = phase_of(clock, deadline=60.0)
    phase.begin(since_s=45.0)
    clock.now += 5
    phase.step()
    assert phase.report() == PhaseReport(steps=1, tokens_per_s=0.0, finish_in_s=10.0)
    clock.now += 10
    assert phase.is_over
    assert phase.seconds == 15.0


def test_progress_is_told_once_a_second_with_what_is_left() -> None:
    clock = Clock()
    phase = phase_of(clock, steps=10)
    reports = []
    for _ in range(8):
        clock.now += 0.5
        phase.tokens += 100
        phase.step()
        reports.append(phase.report())
    assert [report is not None for report in reports] == [False, True] * 4
    assert reports[-1] == PhaseReport(steps=8, tokens_per_s=200.0, finish_in_s=1.0)


@pytest.mark.parametrize(("at", "since_s", "is_whole"), [(0, 0, True), (1, 6, True), (2, 7, False), (9, 59, False)])
def test_phase_that_began_within_its_first_tenth_is_whole(at: int, since_s: float, is_whole: bool) -> None:
    by_steps, by_time = phase_of(Clock(), weighting="uniform"), phase_of(Clock(), deadline=60.0)
    by_steps.begin(at=at)
    by_time.begin(since_s=since_s)
    assert by_steps.is_whole == by_time.is_whole == is_whole
    assert by_steps.has_vote == is_whole


def test_equal_votes_are_for_whole_phases_and_tokens_count_whatever_was_done() -> None:
    uniform, tokens = phase_of(Clock(), weighting="uniform"), phase_of(Clock())
    for phase in (uniform, tokens):
        phase.step()
        phase.tokens += 128
    assert (uniform.weight, tokens.weight) == (1.0, 128.0)
    for phase in (uniform, tokens):
        phase.drop()
    assert (uniform.weight, tokens.weight) == (0.0, 0.0)
    for phase in (uniform, tokens):
        phase.step()
        phase.tokens += 64
        assert phase.steps_done == 1
    assert (uniform.weight, tokens.weight) == (0.0, 64.0)


def test_where_nobody_counts_tokens_steps_make_the_weight_of_the_lineage() -> None:
    """Otherwise all lineages would weigh nothing, and a newcomer as much as a run of a thousand rounds."""
    phase = phase_of(Clock(), weighting="uniform")
    phase.step()
    phase.step()
    assert phase.work == 2
    phase.tokens += 128
    assert phase.work == 128


def test_tokens_that_nobody_counted_are_an_error_that_tells_the_cure() -> None:
    phase = phase_of(Clock())
    phase.step()
    with pytest.raises(SettingsError, match="call count_tokens before each step"):
        _ = phase.weight


def test_trainer_has_stopped_once_it_is_silent_for_much_longer_than_its_steps_take() -> None:
    clock = Clock()
    watch = Watch(clock)
    clock.now += 1000.0
    assert not watch.has_stopped  # the first step may take any time
    watch.begin(0)
    for steps in (2, 4):
        clock.now += 20.0
        watch.report(steps)
    clock.now += 99.0
    assert not watch.has_stopped
    clock.now += 2.0
    assert watch.has_stopped
    watch.report(5)
    assert not watch.has_stopped


def test_trainer_is_stuck_once_it_has_long_had_the_result_of_a_round_and_does_nothing() -> None:
    clock = Clock()
    watch = Watch(clock)
    clock.now += 1000.0
    assert not watch.is_stuck
    for goes_on in (lambda: watch.begin(0), watch.asks):
        watch.answered()
        clock.now += STUCK_S
        assert not watch.is_stuck
        clock.now += 1.0
        assert watch.is_stuck
        goes_on()
        assert not watch.is_stuck


def test_trainer_with_short_steps_is_given_half_a_minute() -> None:
    clock = Clock()
    watch = Watch(clock)
    clock.now += 0.1
    watch.report(10)
    clock.now += 29.0
    assert not watch.has_stopped
    clock.now += 2.0
    assert watch.has_stopped
    watch.begin(0)
    assert not watch.has_stopped
