"""The soak's plan: the same from the same seed, and one that a swarm can survive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.churn import plan

seeds = st.integers(0, 10_000)


@given(seeds)
def test_a_seed_always_gives_the_same_events(seed: int) -> None:
    assert plan(rounds=100, workers=4, seed=seed, every=5) == plan(rounds=100, workers=4, seed=seed, every=5)


@given(seeds, st.integers(3, 6))
def test_at_most_one_worker_of_four_is_away_and_all_are_back_at_the_end(seed: int, workers: int) -> None:
    away: dict[int, int] = {}
    for event in plan(rounds=200, workers=workers, seed=seed, every=4):
        if event.action == "start":
            assert event.round > away.pop(event.worker)
        else:
            assert event.worker not in away
        if event.action in ("leave", "kill"):
            away[event.worker] = event.round
        assert workers - len(away) >= min(workers, 4) - 1
    assert not away


@pytest.mark.parametrize("every", [3, 10])
def test_one_disturbance_comes_in_about_so_many_rounds(every: int) -> None:
    events = [event for event in plan(rounds=2000, workers=8, seed=1, every=every) if event.action != "start"]
    assert len(events) == pytest.approx(1800 / every, rel=0.2)
