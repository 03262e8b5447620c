"""What `./launch.sh` shows: a local swarm that survives the loss of a worker, and stops when it is told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from opendiloco.processes import Processes

if TYPE_CHECKING:
    from support.waiting import WaitUntil
    from support.warm import Forked, Warm

LIMIT_S = 120.0
STOP_LIMIT_S = 10.0


@dataclass
class Demo:
    """A running demo, with what it prints in a file."""

    folder: Path
    popen: Forked

    @property
    def lines(self) -> list[str]:
        return (self.folder / "shown.txt").read_text().splitlines()

    def worker(self, index: int) -> psutil.Process:
        output = str(self.folder / "demo" / f"worker-{index}" / "console.txt")
        children = psutil.Process(self.popen.pid).children()
        (found,) = (child for child in children if os.readlink(f"/proc/{child.pid}/fd/1") == output)
        return found

    def has_shown(self, start: str) -> bool:
        assert self.popen.poll() is None or any(line.startswith(start) for line in self.lines), self.lines
        return any(line.startswith(start) for line in self.lines)


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path, text_file: Path, warm: Warm) -> Iterator[Start]:
    demos: list[Demo] = []

    def start(*arguments: str, rounds: int) -> Demo:
        sets = [f"data.source=text:{text_file}", "inner.steps=3", "inner.batch_size=2", "data.validation_sequences=4"]
        command = ["-m", "opendiloco.demo", "--out", str(tmp_path / "demo"), "--rounds", str(rounds)]
        command += [*arguments, *(part for value in sets for part in ("--set", value))]
        shown = tmp_path / "shown.txt"
        demos.append(Demo(tmp_path, warm.start(command, out=shown, errors=shown, interruptible=False)))
        return demos[-1]

    yield start
    for demo in demos:
        if demo.popen.poll() is None:
            demo.popen.send_signal(signal.SIGTERM)
            demo.popen.wait(LIMIT_S)


def test_demo_goes_on_without_a_worker_that_is_killed(start: Start, wait_until: WaitUntil) -> None:
    demo = start("--set", "swarm.heartbeat_s=1.0", "--set", "swarm.expiry_s=5.0", rounds=4)
    wait_until(lambda: demo.has_shown("round 1 | 3 workers"), "the first round is shown", limit_s=LIMIT_S)
    demo.worker(0).kill()  # the one whose view is shown
    assert demo.popen.wait(LIMIT_S) == 0, demo.lines
    assert "worker-0 was killed by SIGKILL: the others go on" in demo.lines
    rounds = [line for line in demo.lines if line.startswith("round ") and "commit" in line]
    assert [line.split()[1] for line in rounds] == ["1", "2", "3", "4"]
    assert "rounds             4 of 4 committed by both workers that stayed (worker-0 lost)" in demo.lines
    assert "replicas identical: yes" in demo.lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_demo_stops_when_asked_even_if_started_with_interrupts_ignored(
    start: Start, wait_until: WaitUntil, number: signal.Signals
) -> None:
    demo = start("--workers", "2", "--set", "inner.steps=2000", rounds=100)
    wait_until((demo.folder / "demo" / "worker-0" / "metrics.jsonl").exists, "training begins", limit_s=LIMIT_S)
    started = psutil.Process(demo.popen.pid).children(recursive=True)
    demo.popen.send_signal(number)
    assert demo.popen.wait(STOP_LIMIT_S) == 0, demo.lines
    assert demo.lines[-1] == "stopped; everything it started has ended"
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_nothing_is_left_of_a_demo_that_is_killed(start: Start, wait_until: WaitUntil) -> None:
    demo = start("--workers", "2", "--set", "inner.steps=2000", rounds=100)
    wait_until((demo.folder / "demo" / "worker-0" / "metrics.jsonl").exists, "training begins", limit_s=LIMIT_S)
    started = psutil.Process(demo.popen.pid).children(recursive=True)
    demo.popen.kill()
    _, left = psutil.wait_procs(started, timeout=STOP_LIMIT_S)
    assert not left


def test_what_must_be_killed_is_gone_with_all_that_it_started_once_stopping_is_over(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    processes, addresses = Processes(tmp_path), tmp_path / "addresses"
    bootstrap = processes.start("bootstrap", ["bootstrap", "--address-file", str(addresses)])
    wait_until(addresses.exists, "it is there", limit_s=LIMIT_S)
    below = psutil.Process(bootstrap.popen.pid).children(recursive=True)
    assert len(below) >= 3  # guard, network process, daemon
    bootstrap.popen.send_signal(signal.SIGSTOP)
    processes.stop()
    assert not [process for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
