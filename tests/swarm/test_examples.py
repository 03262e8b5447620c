"""The examples run as they are, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.waiting import WaitUntil

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_loop_on_two_peers_ends_with_one_model(tmp_path: Path, wait_until: WaitUntil) -> None:
    def start(name: str, *peers: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / "own_loop.py"), str(tmp_path / name), *peers]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    one = start("one")
    addresses = tmp_path / "one" / "addresses"
    wait_until(lambda: one.poll() is not None or (addresses.exists() and addresses.read_text()), "the first one is up")
    two = start("two", *addresses.read_text().split())
    outputs = [process.communicate(timeout=90)[0] for process in (one, two)]
    assert [process.returncode for process in (one, two)] == [0, 0], outputs
    replicas = [
        [line.split(" | ")[::2] for line in output.splitlines() if line.startswith("round ")] for output in outputs
    ]
    assert replicas[0] == replicas[1]
    assert [line[0] for line in replicas[0]] == ["round 1", "round 2", "round 3", "round 4"]
