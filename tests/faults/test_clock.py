"""A clock that is set while a worker runs: records expire by it, so the worker ends before it believes it is alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.commands import Commands
    from support.peers import Network
    from support.waiting import WaitUntil

SHIFTED_TIME = """
import os, time
now = time.time
def shifted():
    try:
        with open(os.environ["SHIFT_FILE"]) as file:
            return now() + float(file.read())
    except (OSError, ValueError):
        return now()
time.time = shifted
"""
"""Run by every interpreter below; libp2p's daemon does not use the clock."""


def test_worker_whose_clock_jumps_ends_and_says_why(
    network: Network,
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHIFTED_TIME)
    shift = tmp_path / "shift"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SHIFT_FILE", str(shift))
    other = network.peer().open()
    worker = commands.worker(other.addresses, commands.contract(rounds=100_000))
    wait_until(lambda: worker.events("round") or worker.popen.poll() is not None, "it trains")
    shift.write_text("3600")
    assert worker.wait(20.0) == 75
    assert "the clock of this machine has been set by +3600 s: let NTP" in (worker.folder / "log.txt").read_text()
