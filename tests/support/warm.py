"""`opendiloco` commands forked from a process that has imported everything: imports take seconds, a fork none.

The command runs as ever, from `opendiloco.__main__.run` on; only its imports are done already. It becomes a child of
the tests' process, which can wait for it and signal it.
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

import pytest

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 20
IMPORTED = ("opendiloco.cli", "opendiloco.trainer", "opendiloco.swarm", "opendiloco.worker", "opendiloco.simulate")


class Forked:
    """What tests need of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
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

    def start(self, arguments: Sequence[str], *, out: Path, errors: Path) -> Forked:
        """Run `opendiloco ARGUMENTS` with this process's environment and folder, its output in files."""
        request = {
            "arguments": list(arguments),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": [str(out), str(errors)],
        }
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
        try:
            self._socket.send(json.dumps(request).encode())
            answer = self._socket.recv(MESSAGE_BYTES)
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the process that commands are forked from has ended"
        return Forked(int(answer))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Fork a command for every request, until the tests hang up."""
    for module in IMPORTED:
        __import__(module)
    requests = socket.socket(fileno=descriptor)
    while request := requests.recv(MESSAGE_BYTES):
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if (command := os.fork()) == 0:
                os.closerange(3, 256)
                _become(json.loads(request))
            os.write(write, str(command).encode())
            os._exit(0)
        os.close(write)
        command_pid = os.read(read, 64)
        os.close(read)
        os.waitpid(between, 0)  # from here on the command is the tests' child
        requests.send(command_pid)
    os._exit(0)  # taking all those modules apart takes seconds


def _become(request: dict[str, object]) -> None:
    arguments, environment, folder, files = (request[key] for key in ("arguments", "environment", "folder", "files"))
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    assert isinstance(files, list)
    os.setsid()
    os.chdir(str(folder))
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(files, start=1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["opendiloco", *map(str, arguments)]
    from opendiloco.__main__ import run

    run()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()
