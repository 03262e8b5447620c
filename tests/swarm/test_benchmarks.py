"""Each benchmark runs with --quick, and writes the line that the documents are made from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.noisy import WarmWorker

from benchmarks import bench_join, bench_kill, bench_moments

if TYPE_CHECKING:
    from support.warm import Warm


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm) -> Any:
    """Runs a benchmark in this process; returns its line."""

    def run(benchmark: Any) -> dict[str, Any]:
        if hasattr(benchmark, "NoiseWorker"):
            monkeypatch.setattr(benchmark, "NoiseWorker", partial(WarmWorker, warm=warm))
        out = tmp_path / "out.jsonl"
        assert benchmark.main(["--quick", "--out", str(out)]) == 0
        (line,) = map(json.loads, out.read_text().splitlines())
        assert line["commit"]
        assert line["versions"]["hivemind"]
        return line

    return run


def test_the_benchmark_of_kills_ends_with_survivors_of_one_mind(run: Any) -> None:
    line = run(bench_kill)
    assert [trial["digests"] for trial in line["each"]] == [1]
    assert 0 < line["median_s"] <= line["worst_s"]


def test_the_benchmark_of_joiners_says_what_a_join_took(run: Any) -> None:
    line = run(bench_join)
    assert line["join_s"][0] > 0
    assert line["join_bytes"][0] > line["state_bytes"] or line["rounds_replayed"] != [0]
    assert line["ratio"] > 0


def test_the_benchmark_of_joiners_moments_compares_all_of_them(run: Any) -> None:
    (seed,) = run(bench_moments)["each"]
    assert set(seed) == {"nobody", "zero", "donor"}
    assert all(len(found["validation"]) == 1 for found in seed.values())
