"""A minute of random churn: kills, freezes, cuts, leaves; the longer runs are in benchmarks/results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.timeout(300)
def test_all_workers_hold_the_same_bits_after_every_round_of_a_minute_of_churn(tmp_path: Path) -> None:
    out = tmp_path / "soak.jsonl"
    command = [sys.executable, str(SCRIPT), "--rounds", "8", "--every", "1", "--seed", "0", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["problem"] == ""
    assert record["divergences"] == []
    assert record["rounds"] >= 8
    assert sum(record["events"].values()) >= 3
