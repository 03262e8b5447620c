"""How much memory a worker takes, as a multiple of its model (fp32): what docs/design.md says, whatever the round."""

from __future__ import annotations

from pathlib import Path

from benchmarks.links import Links
from benchmarks.noise import NoiseWorker, start_all, stop_all, wait_for_round

VALUES = 5_000_000
ROUNDS = 4


def peaks(folder: Path, *, values: int, count: int) -> dict[str, int]:
    """Of one of `count` workers that have done some rounds."""
    folder.mkdir()
    links = Links()
    workers = [
        NoiseWorker(folder / str(index), links.host(), values=values, workers=count, inner_s=0.1)
        for index in range(count)
    ]
    try:
        start_all(workers)
        while wait_for_round(workers, count) < ROUNDS:
            pass
        return workers[0].peak_bytes()
    finally:
        stop_all(workers)
        links.close()


def test_peak_memory_is_the_documented_multiple_of_the_model(tmp_path: Path) -> None:
    base = peaks(tmp_path / "base", values=1000, count=1)
    multiples = {
        name: (peak - base[name]) / (4 * VALUES)
        for name, peak in peaks(tmp_path / "large", values=VALUES, count=2).items()
    }
    assert 3.0 < multiples["network"] < 4.0  # of the four shared vectors it uses two, unless it gives chunks away
    assert 6.0 < multiples["trainer"] < 7.5  # SGD here; AdamW has two more
