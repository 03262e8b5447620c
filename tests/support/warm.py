"""Python programs forked from a process that has imported everything: imports take seconds, a fork none.

The program runs as ever, an `opendiloco` command from `opendiloco.__main__.run` on; only its imports are done already,
and those of the processes it starts: see `forking`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from support.forking import run_python

ROOT = Path(__file__).parents[2]
MESSAGE_BYTES = 1 << 20
CLONE_NEWNET = 0x40000000
IMPORTED = tuple(f"opendiloco.{name}" for name in ("cli", "trainer", "worker", "simulate", "demo", "network"))


class Forked:
    """What tests need of subprocess.Popen. Its parent is the process it was forked from."""

    def __init__(self, pid: int, warm: Warm) -> None:
        self.pid, self._warm = pid, warm
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ask({"status": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            process = os.pidfd_open(self.pid)
            try:
                if not select.select([process], [], [], timeout)[0]:
                    assert timeout is not None
                    raise subprocess.TimeoutExpired("opendiloco", timeout)
            finally:
                os.close(process)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The process that commands are forked from."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.python_path = os.environ.get("PYTHONPATH")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from support.warm import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
                start_new_session=True,
            )
        self._socket = ours

    def start(
        self,
        arguments: Sequence[str],
        *,
        out: Path,
        errors: Path,
        imports: Sequence[str] = (),
        interruptible: bool = True,
        namespace: str | None = None,
    ) -> Forked:
        """Run `python ARGUMENTS` with this process's environment and folder, its output in files.

        Args:
            arguments: those of `python`: an `opendiloco` command, the demo, or a script.
            imports: what to import first, for this program and later ones.
            interruptible: False: SIGINT is ignored at first, as in what a shell starts in the background.
            namespace: file of the network namespace to run in, instead of this process's.
        """
        for file in (out, errors):
            file.touch()
        pid = self.ask(
            {
                "arguments": list(arguments),
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "files": [str(out), str(errors)],
                "imports": list(imports),
                "interruptible": interruptible,
                "namespace": namespace,
            }
        )
        assert pid is not None
        return Forked(pid, self)

    def ask(self, request: dict[str, object]) -> int | None:
        """A process to fork: its pid. The status of one: its exit code, None while it runs."""
        self._socket.send(json.dumps(request).encode())
        answer = self._socket.recv(MESSAGE_BYTES)
        assert answer, "the process that commands are forked from has ended"
        number: int | None = json.loads(answer)
        return number

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Fork programs and say how they ended, until the tests hang up."""
    for module in IMPORTED:
        __import__(module)
    requests = socket.socket(fileno=descriptor)
    while message := requests.recv(MESSAGE_BYTES):
        request = json.loads(message)
        for module in request.get("imports", ()):
            __import__(module)
        if "status" in request:
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            os.closerange(3, 256)
            _become(request)
        requests.send(json.dumps(answer).encode())
    os._exit(0)  # taking all those modules apart takes seconds


def _become(request: dict[str, object]) -> NoReturn:
    arguments, environment, folder, files = (request[key] for key in ("arguments", "environment", "folder", "files"))
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    assert isinstance(files, list)
    os.setsid()
    if request["namespace"]:
        _enter(str(request["namespace"]))
    os.chdir(str(folder))
    os.environ.clear()
    os.environ.update(environment)
    if not request["interruptible"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(files, start=1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    run_python(*map(str, arguments))


def _enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()
