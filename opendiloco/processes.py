"""Commands of this package as processes: started in folders of their own, and ended in order."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from opendiloco.guard import leave_with_parent
from opendiloco.leave import hang_up

GUARD_LIMIT_S = 4.0  # more than a guard gives what is below it
STOP_LIMIT_S = 6.0  # Ctrl-C leaves nothing running after 10 s


@dataclass
class Process:
    """A command in its folder, with its output in a file there."""

    name: str
    folder: Path
    popen: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        """What it printed."""
        return (self.folder / "console.txt").read_text(errors="replace").strip()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.popen.poll() is None

    @property
    def is_lost(self) -> bool:
        """Whether it has ended other than in order."""
        return self.popen.poll() not in (None, 0)

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.popen.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Processes:
    """Commands that were started together, and their orderly end."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._started: list[Process] = []

    def start(self, name: str, arguments: list[str]) -> Process:
        """Run an `opendiloco` command in a session of its own, so that Ctrl-C reaches only the starter."""
        folder = self._out / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "console.txt").open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "opendiloco", *arguments, "--out", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(leave_with, os.getpid()),
            )
        process = Process(name, folder, popen)
        self._started.append(process)
        return process

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left; waits until the workers' guards have removed what is below them."""
        running = [process.popen for process in self._started if process.is_running]
        guards = [guard for popen in running for guard in _children(popen.pid)]
        for popen in running:
            popen.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + STOP_LIMIT_S
        for process in self._started:
            try:
                process.popen.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
        give_up = time.monotonic() + GUARD_LIMIT_S
        for guard in guards:
            select.select([guard], [], [], max(0.0, give_up - time.monotonic()))
            os.close(guard)


def leave_with(starter: int) -> None:
    """In a process that the main thread of `starter` forks: it gets SIGTERM when that has ended, be it by SIGKILL."""
    leave_with_parent()
    if os.getppid() != starter:
        os._exit(1)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and the end of the terminal raise KeyboardInterrupt.

    SIGINT also where a shell started this process in the background, with SIGINT ignored.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, *hang_up())
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children(pid: int) -> list[int]:
    """pidfds of what the main thread of a process has started."""
    descriptors = []
    with contextlib.suppress(OSError):  # it has just ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(int(child)))
    return descriptors
