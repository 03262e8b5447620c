"""The all-reduce benchmark runs, measures what it claims, and leaves nothing behind (conftest.py looks)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_allreduce.py"


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--quick", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_quick_run_writes_a_line_per_system_and_ends_everything(tmp_path: Path) -> None:
    out = tmp_path / "allreduce.jsonl"
    with start(out) as process:
        printed, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert "pass: replicas identical" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    by_system = {(line["system"], line["codec"]): line for line in lines}
    assert len(lines) == len(by_system) == 3
    for line in lines:
        assert (line["benchmark"], line["workers"], line["values"]) == ("allreduce", 2, 10_000)
        assert 0 <= line["rendezvous_s"] < line["seconds"] <= line["seconds_max"]
        assert line["seconds_min"] <= line["seconds"]
        assert line["commit"]
        assert line["machine"]["cores"] >= 1
        assert line["versions"]["hivemind"]
    int8, baseline, gloo = by_system["opendiloco", "int8"], by_system["hivemind", "fp16"], by_system["gloo", "fp32"]
    assert int8["replica_difference"] == 0
    assert 1e-3 < int8["relative_error"] < 2e-2
    assert gloo["relative_error"] < 1e-6 < baseline["relative_error"] < 1e-3
    assert int8["sent_bytes_source"] == "measured"
    assert 1.0 < int8["sent_bytes_per_value"] < 1.1
    assert (gloo["sent_bytes_source"], gloo["sent_bytes_per_value"]) == ("computed", 4.0)
    assert baseline["ratio_to_hivemind_fp16"] == 1


def test_interrupted_run_ends_everything_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "allreduce.jsonl"
    with start(out) as process:
        assert process.stderr is not None
        while "starting 6 peers" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "nothing was written" in errors
    assert not out.exists()
