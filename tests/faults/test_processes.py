"""Parts of a worker that are killed: it ends with a line that says so, or goes on; nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from opendiloco import guard
from opendiloco.config import SwarmConfig
from opendiloco.swarm import Swarm

if TYPE_CHECKING:
    from support.commands import Command, Commands
    from support.waiting import WaitUntil

ENDS_S = 10.0


def daemon_of(worker: Command) -> psutil.Process:
    (found,) = (process for process in worker.below() if process.name() == "p2pd")
    return found


def guard_of(worker: Command) -> psutil.Process:
    (found,) = psutil.Process(worker.popen.pid).children()
    return found


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def worker(commands: Commands, wait_until: WaitUntil) -> Command:
    """A worker that has committed a round and has many before it."""
    worker = commands.worker(contract=commands.contract(rounds=100_000))
    wait_until(lambda: worker.events("round") or worker.popen.poll() is not None, "it has committed a round")
    return worker


@pytest.mark.parametrize(
    ("find", "reason"),
    [
        (daemon_of, "libp2p's daemon (p2pd) has ended with code -9: this peer is cut off from the others"),
        (guard_of, "the guard of this process has been killed: this peer ends"),
        (lambda worker: worker.network_process(), "the network process was killed by SIGKILL"),
    ],
    ids=["libp2p's daemon", "the guard", "the network process"],
)
def test_worker_whose_helper_is_killed_ends_and_says_why(
    worker: Command, find: object, reason: str, wait_until: WaitUntil
) -> None:
    helpers = worker.below()
    find(worker).kill()  # type: ignore[operator]
    assert worker.wait(ENDS_S) == 75
    assert "the network process of this peer has ended: the reason is in" in worker.complaint
    assert reason in (worker.folder / "log.txt").read_text()
    wait_until(lambda: all(map(is_gone, helpers)), "nothing of it is left", limit_s=ENDS_S)
    left = [path for path in Path(tempfile.gettempdir()).glob("opendiloco-*") if path.is_dir()]
    wait_until(lambda: not any(path.exists() for path in left), "its sockets are gone", limit_s=ENDS_S)


def test_the_folder_of_a_peer_in_use_is_never_taken_for_an_orphan(tmp_path: Path) -> None:
    with Swarm(SwarmConfig(), tmp_path) as peer:
        peer.open()
        folders = list(Path(tempfile.gettempdir()).glob("opendiloco-*"))
        for folder in folders:
            os.utime(folder, (0, 0))
        (guard_process,) = (child for child in psutil.Process().children() if "opendiloco.network" in child.cmdline())
        guard_process.suspend()
        try:
            subprocess.run(guard.guard_command(["true"]), stdin=subprocess.DEVNULL, check=False)  # looks for orphans
            assert folders
            assert all(folder.exists() for folder in folders)
        finally:
            guard_process.resume()
        assert peer.runs() == {}
