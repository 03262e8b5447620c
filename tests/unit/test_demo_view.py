"""The demo's judgement: which losses end it, and whose view of a round is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from opendiloco.demo import _unseen, _watch
from opendiloco.errors import SwarmError
from opendiloco.metrics import MetricsReader
from opendiloco.processes import Process


def ended(folder: Path, code: str) -> Process:
    """A worker that has ended after it ran `code`."""
    folder.mkdir()
    with (folder / "console.txt").open("wb") as output:
        popen = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    popen.wait()
    return Process(folder.name, folder, popen)


def attempt(round: int, verdict: str, time: float) -> dict[str, Any]:
    return {"event": "round", "round": round, "verdict": verdict, "time": time}


def test_worker_that_is_lost_before_the_first_round_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    workers = [ended(tmp_path / "a", "pass"), ended(tmp_path / "b", "raise SystemExit('data.seq_len is too long')")]
    readers = [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers]
    with pytest.raises(SwarmError, match=r"b ended with exit code 1: data\.seq_len is too long"):
        _watch(workers, readers, 8, 40, Console(quiet=True))


def test_rounds_are_shown_once_whoever_tells_of_them() -> None:
    first = [attempt(1, "commit", 1.0), attempt(2, "retry", 2.0)]
    assert _unseen(first, []) == first
    assert _unseen(first, first) == []
    second = [attempt(1, "commit", 1.1), attempt(2, "retry", 2.1), attempt(2, "commit", 3.1)]
    assert _unseen(second, first) == [second[2]]
