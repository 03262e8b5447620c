"""The cost model: it finds the numbers that made its data, and says what follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_cost
from benchmarks.common import BenchmarkError
from benchmarks.cost import (
    BYTES_PER_VALUE,
    COMPANY_FIELDS,
    Company,
    Exchange,
    Measured,
    Training,
    company_errors,
    fit,
    held_out_errors,
    payload_s,
    predict_company,
    utilization,
)
from opendiloco.rounds import stretch

TRAINING = Training(parameters=1e9, steps=100, tokens=1_000, flops=6e13)  # 10 s


def test_payload_of_two_workers_is_the_vector_once_and_of_many_nearly_twice() -> None:
    once = 1e6 * BYTES_PER_VALUE["fp16"] * 8 / 1e8
    assert payload_s(1e6, 2, "fp16", 100.0) == pytest.approx(once)
    assert payload_s(1e6, 1_000, "fp16", 100.0) == pytest.approx(2 * once, rel=0.01)


@given(st.floats(1.0, 3.0), st.floats(0.0, 1.0))
def test_fit_finds_the_exchange_that_made_the_data(wire_factor: float, fixed_s: float) -> None:
    exchange = Exchange(wire_factor, fixed_s)
    runs = [
        Measured(2_000_000, workers, codec, mbit, exchange.seconds(2_000_000, workers, codec, mbit))
        for workers in (2, 4)
        for codec in ("int8", "fp16")
        for mbit in (20.0, 100.0)
    ]
    found = fit(runs)
    assert (found.wire_factor, found.fixed_s) == (pytest.approx(wire_factor), pytest.approx(fixed_s, abs=1e-9))
    assert held_out_errors(runs) == pytest.approx([0.0] * len(runs), abs=1e-9)


def test_a_run_that_does_not_follow_the_others_shows_in_its_error() -> None:
    exchange = Exchange(1.2, 0.1)
    runs = [Measured(10**6, 4, "int8", mbit, exchange.seconds(10**6, 4, "int8", mbit)) for mbit in (10.0, 20.0, 50.0)]
    odd = Measured(10**6, 4, "int8", 100.0, 2 * exchange.seconds(10**6, 4, "int8", 100.0))
    assert held_out_errors([*runs, odd])[-1] == pytest.approx(-0.5)


def test_time_that_trains_is_that_of_phases_and_every_death_costs_half_of_one() -> None:
    assert TRAINING.inner_s == pytest.approx(10.0)
    assert utilization(TRAINING, 0.0, workers=8) == 1.0
    assert utilization(TRAINING, 10.0, workers=8) == pytest.approx(0.5)
    an_hour = 3600 / 10.0  # deaths of each worker: one a round
    assert utilization(TRAINING, 0.0, workers=2, deaths_per_hour=an_hour) == pytest.approx(0.5)
    assert utilization(TRAINING, 0.0, workers=1, deaths_per_hour=an_hour, recovery_s=10.0) == pytest.approx(0.25)


def test_cost_of_other_swarms_follows_from_the_rounds_that_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_cost.main(["--out", str(tmp_path / "cost.jsonl")]) == 0
    assert "predicted from the others" in capsys.readouterr().out
    assert (tmp_path / "cost.jsonl").read_text().count("exchange_s") == 6 * 4 * 4


@given(st.tuples(*[st.floats(0.1, 100.0)] * 6))
def test_fit_finds_the_company_that_made_the_data(numbers: tuple[float, ...]) -> None:
    def company(workers: int) -> Company:
        beats = stretch(workers)
        standing, bytes_, cpu = (numbers[at] + numbers[at + 1] * workers for at in (0, 2, 4))
        return Company(workers, standing / beats, bytes_, cpu)

    measured = [company(workers) for workers in (8, 16, 24, 32)]
    measured.append(Company(2, 1.0, 1.0, 1.0))  # follows other rules
    found, wanted = predict_company(measured, 128), company(128)
    for name in COMPANY_FIELDS:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name))
    assert len(company_errors(measured)) == 4
    for errors in company_errors(measured):
        assert errors == pytest.approx(dict.fromkeys(COMPANY_FIELDS, 0.0), abs=1e-6)


def test_too_few_numbers_of_workers_to_check_a_model_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="too few different numbers of workers: run bench dht first"):
        bench_cost.measured_company(tmp_path / "dht.jsonl")


def test_too_few_rounds_to_check_a_model_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="too few different rounds: run bench wan first"):
        bench_cost.measured_runs(tmp_path / "wan.jsonl")
