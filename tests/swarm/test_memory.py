"""How much memory a worker takes, as a multiple of its model (fp32): what docs/design.md says, whatever the round."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.links import Links
from benchmarks.noise import NoiseWorker, start_all, stop_all, wait_for_round

VALUES = 10_000_000
ROUNDS = 4


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[NoiseWorker]:
    """One that has done some rounds with another one."""
    links = Links()
    workers = [
        NoiseWorker(tmp_path / f"worker-{index}", links.host(), values=VALUES, workers=2, inner_s=0.1)
        for index in (0, 1)
    ]
    try:
        start_all(workers)
        while wait_for_round(workers, 2) < ROUNDS:
            pass
        yield workers[0]
    finally:
        stop_all(workers)
        links.close()


def network_process_without_a_model() -> int:
    """Its peak memory."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import opendiloco.network; print(open('/proc/self/status').read())",
    ]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def test_peak_memory_is_the_documented_multiple_of_the_model(worker: NoiseWorker) -> None:
    joined, peaks = worker.joined(), worker.peak_bytes()
    assert joined is not None
    trainer = (peaks["trainer"] - joined["base_bytes"]) / (4 * VALUES)
    network = (peaks["network"] - network_process_without_a_model()) / (4 * VALUES)
    assert 3.0 < network < 4.5  # of the four shared vectors it uses two, unless it gives chunks away
    assert 6.0 < trainer < 8.0  # SGD here; AdamW has two more
