"""`subprocess` for programs of this project that have everything imported: what they start is a fork of them.

The tree of processes, their descriptors, environment, signals and sessions are those that subprocess makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NoReturn

PR_SET_NAME = 15
NETWORK = "opendiloco.network"
STARTERS = ("opendiloco.processes", "opendiloco.peer", "opendiloco.guard")
"""Modules that start programs of the project."""


class Popen:
    """A program of the project in a fork of this process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        theirs, ours = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), -1)
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            if preexec_fn is not None:
                preexec_fn()
            files = [theirs, *(file.fileno() if file else number for number, file in ((1, stdout), (2, stderr)))]
            _begin(files, pass_fds, dict(os.environ if env is None else env))
            run_python(*command[1:])
        os.close(theirs)
        if ours >= 0:
            self.stdin = os.fdopen(ours, "wb", buffering=0)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if self.poll() is None and timeout is not None:
            process = os.pidfd_open(self.pid)
            is_over = select.select([process], [], [], timeout)[0]
            os.close(process)
            if not is_over:
                raise subprocess.TimeoutExpired("opendiloco", timeout)
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(files: Sequence[int], kept: Sequence[int], environment: dict[str, str]) -> None:
    """In the child: what a new process has from exec, and what a module keeps of the process it was imported in."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    copies = [os.dup(file) for file in files]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    _close_all_but({0, 1, 2, *kept})
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    logging.getLogger().handlers.clear()


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def run_python(*arguments: str) -> NoReturn:
    """What `python ARGUMENTS` does."""
    code: object = 0
    try:
        match arguments:
            case ["-m", "opendiloco", *rest]:
                _fork_children()
                _call("opendiloco.__main__", "run", ["opendiloco", *rest])
            case ["-m", "opendiloco.demo", *rest]:
                _fork_children()
                code = importlib.import_module("opendiloco.demo").main(rest)
            case ["-I", "-S", guard, *rest]:
                code = _call("opendiloco.guard", "main", [guard, *rest])
            case ["-m", name, *rest] if name == NETWORK:
                ctypes.CDLL(None).prctl(PR_SET_NAME, NETWORK.encode())
                _call(NETWORK, "main", [name, *rest])
            case [script, *rest]:
                sys.argv = [script, *rest]
                runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def _fork_children() -> None:
    for name in STARTERS:
        vars(importlib.import_module(name))["subprocess"] = _Subprocess


def _call(module: str, function: str, argv: list[str]) -> Any:
    sys.argv = argv
    return getattr(importlib.import_module(module), function)()


class _Subprocess:
    """What those modules use of `subprocess`."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired
    Popen = Popen
