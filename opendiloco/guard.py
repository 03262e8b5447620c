"""Owner of a worker's helper processes: when the worker is gone, for whatever reason, so are they.

The trainer starts this file as a script (`python guard.py COMMAND...`) in a session of its own and holds the write
end of the guard's standard input. The guard makes a runtime folder, where COMMAND (the network process, which in turn
starts libp2p's daemon) finds it as its temporary folder, and becomes the subreaper of everything below it. The end of
standard input - an orderly close or a kill -9 of the trainer - makes it stop COMMAND; the end of COMMAND makes it kill
what COMMAND left behind. Last it removes the runtime folder with the sockets in it; locks held by inherited
descriptors last until then. Nobody else makes anything that would have to be removed: an owner may be killed at any
moment. Only the standard library is used, so that it is up in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRACE_S = 3.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PREFIX = "opendiloco-"
FDS_VARIABLE = "OPENDILOCO_FDS"
"""Environment variable that lists the descriptors which the guard passes on to COMMAND."""


_libc = ctypes.CDLL(None, use_errno=True)


def leave_with_parent() -> None:
    """This process gets SIGTERM when the thread that started it has ended, be it by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def guard_command(command: list[str]) -> list[str]:
    """The command line that runs `command` under a guard."""
    return [sys.executable, "-I", "-S", __file__, *command]


def runtime_dir() -> Path:
    """The folder that is removed after this process, when that is one below a guard."""
    return Path(os.environ["TMPDIR"])


def _make_runtime_dir() -> Path:
    """A private folder (mode 700) with a short path: unix sockets allow about 100 characters."""
    parent = tempfile.gettempdir()
    if len(parent) > 40:
        parent = "/tmp"
    _remove_orphans(Path(parent))
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def _lock(runtime_dir: Path) -> int | None:
    """Take the folder's lock, which says that its guard lives; None when another process holds it."""
    descriptor = os.open(runtime_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_orphans(parent: Path) -> None:
    """Remove the folders of guards that were killed themselves (for example with their whole container)."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < 60:
                continue
            if not (folder / "lock").exists():
                folder.rmdir()  # of a guard killed before it took the lock; fails on anybody else's
                continue
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _children() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in children.read_text().split()]


def _kill_descendants() -> None:
    """Kill children until none is left: those of a killed child become the subreaper's own."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _wait_for_end(child: int, owner: int) -> bool:
    """Wait until the child ends (True), or the owner ends or closes its end of standard input (False).

    Args: pidfds. The owner's is watched too, because processes it forks keep its end of the pipe open.
    """
    while True:
        readable, _, _ = select.select([0, child, owner], [], [])
        if child in readable:
            return True
        if owner in readable or not os.read(0, 4096):
            return False


def main() -> int:
    command = sys.argv[1:]
    owner = os.pidfd_open(os.getppid())
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the owner's end ends the guard; not inherited, unlike SIG_IGN
    inherited = [int(fd) for fd in os.environ.get(FDS_VARIABLE, "").split(",") if fd]
    try:
        folder = _make_runtime_dir()
        lock = _lock(folder)
    except OSError as error:
        print(f"no folder for sockets can be made: {error.strerror}", file=sys.stderr)
        return 1
    try:
        kept = [lock] if lock is not None else []  # a folder is in use as long as anybody below lives
        environment = {**os.environ, "TMPDIR": str(folder)}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[*inherited, *kept], env=environment)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    if _wait_for_end(os.pidfd_open(child.pid), owner):
        if (code := child.wait()) < 0:
            print(f"the network process was killed by {signal.Signals(-code).name}", file=sys.stderr)
    else:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    status = child.poll()
    _kill_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
    return status if status is not None and status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
