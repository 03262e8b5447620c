"""The guard, with real processes: whatever ends the owner or the child, nothing of them is left."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from opendiloco import guard

PATIENCE_S = 30.0
FINISHED_S = 120.0  # age of a runtime folder that nobody can be just about to use

# Starts a guard as a worker does, says where, and waits to be killed or for the end of its standard input.
OWNER = """
import os, signal, subprocess, sys
from opendiloco import guard
inherited = [int(fd) for fd in sys.argv[1].split(",") if fd]
process = subprocess.Popen(
    guard.guard_command(sys.argv[2:]),
    stdin=subprocess.PIPE,
    pass_fds=inherited,
    env={**os.environ, guard.FDS_VARIABLE: sys.argv[1]},
    start_new_session=True,
)
print("owner", process.pid, flush=True)
if sys.stdin.readline() == "fork\\n":
    copy = os.fork()
    if copy == 0:
        signal.pause()
    print("copy", copy, flush=True)
    sys.stdin.readline()
process.stdin.close()
print("status", process.wait(), flush=True)
"""

# A child with a child of its own that has left its session, as a daemon does.
CHILD = """
import subprocess, sys, os, signal
grandchild = subprocess.Popen(["setsid", "sleep", "600"])
print("child", os.environ["TMPDIR"], os.getpid(), grandchild.pid, flush=True)
"""
STAY = "signal.pause()"

# Forks what becomes a guard, says so, and waits to be killed.
FORK_AND_WAIT = """
import os, signal, sys
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.close(write)
    os.dup2(read, 0)
    os.execv(sys.argv[1], sys.argv[1:])
os.close(read)
os.write(1, b".")
signal.pause()
"""

NO_SPACE = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass
class Family:
    """An owner, its guard, the guard's child and grandchild. All hold the standard output that is read here."""

    owner: subprocess.Popen[str]
    folder: Path
    guard: int
    child: int
    grandchild: int

    def wait_for_the_end(self) -> str:
        """What was still printed until the last of them had ended."""
        assert self.owner.stdout is not None
        rest, end = "", time.monotonic() + PATIENCE_S
        while select.select([self.owner.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            read = os.read(self.owner.stdout.fileno(), 4096).decode()
            if not read:
                return rest
            rest += read
        raise AssertionError(f"still there after {PATIENCE_S} s: {[pid for pid in self.pids() if is_alive(pid)]}")

    def pids(self) -> list[int]:
        return [self.guard, self.child, self.grandchild]

    def is_gone(self) -> bool:
        return not any(map(is_alive, self.pids()[1:])) and not self.folder.exists()


@contextmanager
def family(*, child: str = CHILD + STAY, fds: str = "", command: list[str] | None = None) -> Iterator[Family]:
    command = command or [sys.executable, "-I", "-S", "-c", child]
    pipe = subprocess.PIPE
    inherited = [int(fd) for fd in fds.split(",") if fd]
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, fds, *command], stdin=pipe, stdout=pipe, text=True, pass_fds=inherited
    ) as owner:
        assert owner.stdout is not None
        said = dict[str, list[str]]()
        while not {"owner", "child"} <= said.keys():
            word, *values = read_line(owner)
            said[word] = values
        folder, *pids = said["child"]
        members = Family(owner, Path(folder), *map(int, said["owner"]), *map(int, pids))
        try:
            yield members
        finally:
            owner.kill()
            members.wait_for_the_end()


def read_line(owner: subprocess.Popen[str]) -> list[str]:
    """One line, read byte by byte: nothing may stay in a buffer that `select` does not see."""
    assert owner.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(owner.stdout.fileno(), 1)
        assert byte, f"the owner ended after {line!r}"
        line += byte
    return line.decode().split()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def has_ended(pid: int, *, within_s: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


def tell(owner: subprocess.Popen[str], line: str) -> None:
    assert owner.stdin is not None
    owner.stdin.write(line)
    owner.stdin.flush()


# --- whoever ends --------------------------------------------------------------------------------------


def test_kill_9_of_the_owner_ends_child_and_grandchild_and_removes_the_folder() -> None:
    with family() as killed:
        (killed.folder / "p2p.sock").touch()
        killed.owner.kill()
        killed.wait_for_the_end()
        assert killed.is_gone()


def test_an_owner_that_ends_in_order_takes_all_with_it() -> None:
    with family() as ended:
        tell(ended.owner, "end\n")
        assert ended.wait_for_the_end().startswith("status ")
        assert ended.is_gone()


@pytest.mark.parametrize(
    ("end", "status"),
    [("sys.exit(0)", 0), ("sys.exit(75)", 75), ("os.kill(os.getpid(), signal.SIGKILL)", 1)],
)
def test_the_end_of_the_child_ends_the_grandchild_and_gives_the_guards_status(end: str, status: int) -> None:
    with family(child=CHILD + end) as ended:
        assert has_ended(ended.guard, within_s=PATIENCE_S)
        tell(ended.owner, "end\n")
        assert ended.wait_for_the_end() == f"status {status}\n"
        assert ended.is_gone()


def test_signals_do_not_end_the_guard_before_its_work_is_done() -> None:
    with family() as disturbed:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(disturbed.guard, number)
        disturbed.owner.kill()
        disturbed.wait_for_the_end()
        assert disturbed.is_gone()


def test_the_child_is_not_made_deaf_to_signals() -> None:
    """It gets SIGTERM and GRACE_S to end in order: the guard's own deafness must not be inherited."""
    report = "print([line for line in open('/proc/self/status') if line.startswith('SigIgn')][0], flush=True)\n"
    with family(child=CHILD + report + STAY) as asked:
        name, mask = read_line(asked.owner)
        assert name == "SigIgn:"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            assert not int(mask, 16) & 1 << (number - 1), f"signal {number} is ignored in the child"


def test_a_process_that_the_owner_forked_does_not_keep_the_guard_waiting() -> None:
    """Loaders of data and pools are forks of the trainer: they hold copies of all its descriptors."""
    with family() as forked:
        tell(forked.owner, "fork\n")
        _, copy = read_line(forked.owner)
        try:
            forked.owner.kill()
            assert has_ended(forked.guard, within_s=3 * guard.GRACE_S), "the guard still waits for the forked process"
            assert forked.is_gone()
        finally:
            os.kill(int(copy), signal.SIGKILL)


def test_a_lock_that_the_guard_inherited_is_held_until_all_is_cleaned_up(tmp_path: Path) -> None:
    """The next process with this key starts only when the port and the sockets of this one are free."""
    descriptor = os.open(tmp_path / "identity.key", os.O_CREAT | os.O_RDONLY, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    stubborn = CHILD + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\nwhile True: " + STAY
    with family(child=stubborn, fds=str(descriptor)) as locked:
        assert read_line(locked.owner) == ["deaf"]
        os.close(descriptor)  # from here on the family alone holds the lock
        second = os.open(tmp_path / "identity.key", os.O_RDONLY)
        locked.owner.kill()
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX)
        assert locked.is_gone()
        os.close(second)


def run_guard(command: list[str], temporary: Path) -> subprocess.CompletedProcess[str]:
    read, write = os.pipe()
    try:
        return subprocess.run(
            guard.guard_command(command),
            stdin=read,
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        os.close(read)
        os.close(write)


def test_a_command_that_cannot_be_started_leaves_no_folder(short_tmp: Path) -> None:
    done = run_guard([str(short_tmp / "no such program")], short_tmp)
    assert done.returncode == 1
    assert done.stderr == f"{short_tmp}/no such program cannot be started: No such file or directory\n"
    assert not list(short_tmp.iterdir())


def test_a_guard_that_can_make_no_folder_says_so(short_tmp: Path) -> None:
    """A disk on which no byte can be written, as a full one."""
    limited = [sys.executable, "-c", NO_SPACE, *guard.guard_command(["true"])]
    done = subprocess.run(
        limited, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("no folder for sockets can be made: No usable temporary directory found in")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("delay_s", [0.002 * step for step in range(30)])
def test_an_owner_may_be_killed_at_any_moment_of_a_start(delay_s: float, short_tmp: Path) -> None:
    """Nothing is made before there is a guard, and a guard cleans up also if its owner has gone before it is up."""
    environment = {**os.environ, "TMPDIR": str(short_tmp)}
    fork = [sys.executable, "-I", "-S", "-c", FORK_AND_WAIT, *guard.guard_command([sys.executable, "-c", STAY])]
    with subprocess.Popen(fork, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        owner.stdout.read(1)
        time.sleep(delay_s)  # the moment is the case
        owner.kill()
        assert select.select([owner.stdout], [], [], PATIENCE_S)[0], "somebody still holds the owner's output"
        assert owner.stdout.read() == b""
    assert not list(short_tmp.iterdir())


# --- runtime folders -----------------------------------------------------------------------------------


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="g-") as folder:
        yield Path(folder)


def start_of_another(temporary: Path) -> Path:
    """What the next worker of this machine does: returns the folder that it had."""
    command = [
        sys.executable,
        "-c",
        "import os; print(os.environ['TMPDIR'], oct(os.stat(os.environ['TMPDIR']).st_mode))",
    ]
    done = run_guard(command, temporary)
    folder, mode = done.stdout.split()
    assert mode == "0o40700"
    assert len(folder) < 60
    assert not Path(folder).exists()
    return Path(folder)


def make_old(folder: Path) -> None:
    moment = time.time() - FINISHED_S
    os.utime(folder, (moment, moment))


def test_a_runtime_folder_is_private_and_goes_with_its_guard(short_tmp: Path) -> None:
    assert start_of_another(short_tmp).parent == short_tmp


def test_a_long_temporary_folder_is_not_used_for_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 40)
    long.mkdir()
    assert start_of_another(long).parent == Path("/tmp")


def test_the_folder_of_a_guard_that_was_killed_itself_goes_at_the_next_start() -> None:
    with family() as lost:
        for pid in (*lost.pids(), lost.owner.pid):  # the guard first: one that sees its owner end cleans up
            os.kill(pid, signal.SIGKILL)
        lost.wait_for_the_end()
        assert lost.folder.exists()
        (lost.folder / "p2p.sock").touch()
        make_old(lost.folder)
        start_of_another(lost.folder.parent)
        assert not lost.folder.exists()


def test_the_folder_of_a_living_guard_stays_however_old_it_is() -> None:
    with family() as living:
        make_old(living.folder)
        start_of_another(living.folder.parent)
        assert living.folder.exists()


@pytest.mark.parametrize(
    ("content", "age", "stays"),
    [
        ([], "old", False),  # of a guard that was killed before it took the lock
        (["lock"], "old", False),
        (["lock", "p2p.sock"], "old", False),
        ([], "new", True),
        (["lock"], "new", True),
        (["notes.txt"], "old", True),
        (["run/peer.toml"], "old", True),
    ],
)
def test_only_old_folders_of_guards_go(content: list[str], age: str, stays: bool, short_tmp: Path) -> None:
    folder = short_tmp / "opendiloco-results"
    folder.mkdir()
    for name in content:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    if age == "old":
        make_old(folder)
    start_of_another(short_tmp)
    assert folder.exists() == stays
    assert not stays or all((folder / name).exists() for name in content)
