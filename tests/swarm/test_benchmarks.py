"""Each benchmark runs with --quick, and writes the lines that the documents are made from."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks import bench_join, bench_kill, bench_moments, bench_worker

if TYPE_CHECKING:
    from support.noisy import RunBenchmark


BENCHMARK = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from benchmarks.noise import NoiseWorker
host = SimpleNamespace(prefix=[], settings={"host_maddrs": ["/ip4/127.0.0.1/tcp/0"]})
worker = NoiseWorker(Path(sys.argv[1]) / "worker", host, values=1000, workers=1, inner_s=1.0)
worker.start([])
while not worker.addresses:
    worker.lines()
    time.sleep(0.05)
print("up", flush=True)
time.sleep(600)
"""


def test_nothing_is_left_of_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, str(tmp_path)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    ) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == b"up\n"
        started = psutil.Process(benchmark.pid).children(recursive=True)
        assert len(started) >= 4  # worker, guard, network process, daemon
        benchmark.kill()
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left


def test_the_benchmark_of_kills_ends_with_survivors_of_one_mind(run_benchmark: RunBenchmark) -> None:
    (line,) = run_benchmark(bench_kill)
    assert [trial["digests"] for trial in line["each"]] == [1]
    assert 0 < line["median_s"] <= line["worst_s"]


def test_the_benchmark_of_joiners_says_what_a_join_took(run_benchmark: RunBenchmark) -> None:
    (line,) = run_benchmark(bench_join)
    assert line["join_s"][0] > 0
    assert line["join_bytes"][0] > line["state_bytes"] or line["rounds_replayed"] != [0]
    assert line["ratio"] > 0


def test_the_benchmark_of_joiners_moments_compares_all_of_them(run_benchmark: RunBenchmark) -> None:
    (line,) = run_benchmark(bench_moments)
    (seed,) = line["each"]
    assert set(seed) == {"nobody", "zero", "donor"}
    assert all(len(found["validation"]) == 1 for found in seed.values())


def test_the_benchmark_of_a_worker_sets_it_against_the_plain_loop(run_benchmark: RunBenchmark) -> None:
    (line,) = run_benchmark(bench_worker)
    assert len(line["phase_ratios"]) == len(line["round_ratios"]) == line["rounds"]
    assert line["round_ratio"] > 0
    assert math.isfinite(line["end_of_round_s"])  # of a single round: less than what else the machine does
