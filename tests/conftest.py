"""Every test cleans up: no process, thread, shared-memory file or runtime folder of its own outlives it.

Only what this run started counts, because others may use the machine: descendants of this process, processes that
carry the run's mark in their environment (sessions of their own outlive their parent), and folders in a temporary
folder that is this run's alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: several processes with several threads each wait for one another

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, here and in all that is started from here

# Examples take as long as they take: others may keep the machine busy.
settings.register_profile("opendiloco", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("opendiloco")

MARK = "OPENDILOCO_TEST_RUN"
THREAD_END_S = 2.0  # a thread that has been told to end may need a moment
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Inventory:
    """What there is at one moment: the names of all processes and shared-memory files, our threads and folders."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    shared_memory: frozenset[str]
    folders: frozenset[str]

    @classmethod
    def take(cls) -> Inventory:
        return cls(
            frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal()),
            frozenset(thread for thread in threading.enumerate() if not thread.daemon),
            frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset(),
            frozenset(path.name for path in Path(tempfile.gettempdir()).glob("opendiloco-*")),
        )


def pytest_configure(config: pytest.Config) -> None:
    """hivemind uses a function that torch calls deprecated, while it is imported; all other warnings are errors."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(scope="session", autouse=True)
def _own_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A mark on all processes of this run, and a temporary folder of its own (short: sockets are put there)."""
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where users look for them
    folder = tempfile.mkdtemp(prefix="odl-", dir="/tmp")
    before, tempfile.tempdir = tempfile.tempdir, folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setenv(MARK, f"{os.getpid()}-{secrets.token_hex(8)}")
        started = Inventory.take()
        yield
        left = _clean_up_after(started)
    tempfile.tempdir = before
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"left behind at the end of the run: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(_own_session: None) -> Iterator[None]:
    """Fails the test that leaves something running or lying about."""
    if "torch" in sys.modules:  # hivemind has torch share tensors through files in /dev/shm once it is imported
        sys.modules["torch"].multiprocessing.set_sharing_strategy("file_descriptor")
    before = Inventory.take()
    yield
    if left := _clean_up_after(before):
        pytest.fail(f"left behind: {'; '.join(left)}", pytrace=False)


def _clean_up_after(before: Inventory) -> list[str]:
    """Name what has come since `before` and is ours; remove it, so that the next test does not suffer."""
    left = []
    give_up = time.monotonic() + THREAD_END_S
    for thread in Inventory.take().threads - before.threads:
        thread.join(max(0.0, give_up - time.monotonic()))
        if thread.is_alive():
            left.append(f"thread {thread.name}")
    now = Inventory.take()
    ours = {pid: command for pid in now.processes - before.processes if (command := _own_command(pid))}
    for pid, command in ours.items():
        left.append(f"process {pid} ({command})")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if names := now.shared_memory - before.shared_memory:
        others = _shared_memory_of_others()
        names = {name for name in names - others if (SHARED_MEMORY / name).exists()}
        left.extend(f"shared memory {name}" for name in sorted(names))
    for name in now.folders - before.folders:
        left.append(f"folder {name}")
        shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)
    return left


def _own_command(pid: int) -> str:
    """Command line of a process that this run started; empty for others, and for helpers that end with this process."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        if os.getpid() not in _ancestors(pid) and not _is_marked(pid):
            return ""
    except (OSError, ValueError):  # gone meanwhile, or somebody else's
        return ""
    return "" if "multiprocessing.resource_tracker" in command else command or "a process not waited for"


def _is_marked(pid: int) -> bool:
    return f"{MARK}={os.environ[MARK]}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        yield pid


def _shared_memory_of_others() -> set[str]:
    """Names of the shared-memory files that processes which are not ours have open or mapped."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and not _own_command(int(process.name)):
            with contextlib.suppress(OSError):
                handles = [os.readlink(handle) for handle in (process / "fd").iterdir()]
                mapped = re.findall(rf"{SHARED_MEMORY}/\S+", (process / "maps").read_text())
                names |= {path.removeprefix(f"{SHARED_MEMORY}/") for path in [*handles, *mapped]}
    return names
