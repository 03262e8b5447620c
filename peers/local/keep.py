#!/usr/bin/env python3
"""Keep a peer running: keep.py opendiloco train ... --resume latest

It is started again when it could not reach or stay in the swarm (75), and after any other failure. It is not when it
has finished or left on request (0), and not when its settings are wrong (64): the same ones would fail again.

Of a worker of several processes torchrun knows one failure only, 1, and says so too when it was asked to end: what
counts then is what the processes themselves have written into the file that OPENDILOCO_EXIT_FILE names (see
opendiloco/launcher.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

DONE, UNKNOWN, WRONG_SETTINGS = 0, 1, 64
MAX_S = 86400
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EXIT_FILE = "OPENDILOCO_EXIT_FILE"
FIRST = "0"
"""The process that is the worker; others of torchrun's help it to compute."""


class Misused(Exception):
    """This program cannot begin with what it was given; the message says what, and the cure."""


class Keeper:
    """Hands signals on to the peer that runs: each once, for a second one would end it at once."""

    def __init__(self, exit_file: Path) -> None:
        self.leaving = threading.Event()
        self._exit_file = exit_file
        self._child: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._leave)

    def run(self, command: list[str]) -> int:
        """Run the peer once; returns the exit code that it means."""
        self._exit_file.write_text("")
        environment = {**os.environ, EXIT_FILE: str(self._exit_file)}
        # in a group of its own: Ctrl-C in a terminal comes from here
        with _start(command, environment) as child:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            self._child = child
            if self.leaving.is_set():  # asked before there was anybody to hand it on to
                child.terminate()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            code = child.wait()
            self._child = None
        lines = map(str.split, self._exit_file.read_text().splitlines())
        told = {line[0]: line[1] for line in lines if len(line) == 2}  # a disk that is full may cut one off
        return meaning(code if code >= 0 else 128 - code, told, asked=self.leaving.is_set())

    def _leave(self, number: int, frame: object) -> None:
        if self._child is not None:
            self._child.send_signal(number)
        self.leaving.set()


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, process_group=0, env=environment)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Misused(f"cannot run {command[0]}: {reason}: give a command that can be run") from None


def meaning(code: int, told: Mapping[str, str], *, asked: bool) -> int:
    """The exit code that a peer means whose command ended with `code`, as a shell has it.

    Args:
        told: process -> its own exit code, or "began" where it did not come to tell; empty unless it was a worker.
        asked: whether the peer was asked to leave.
    """
    if str(WRONG_SETTINGS) in told.values():  # of any process: one may lack the GPU that the others have
        return WRONG_SETTINGS
    if asked:
        if code in [128 + number for number in SIGNALS]:  # it had no handler yet, or was asked a second time
            return DONE
        if code == UNKNOWN and FIRST not in told:  # torchrun's, before there was anything to leave
            return DONE
    own = told.get(FIRST, "")
    if code != DONE and own.isdecimal() and (asked or own != str(DONE)):  # torchrun asks it to leave when another fails
        return int(own)
    return code


def main(command: list[str]) -> int:
    """Run `command` again and again until that is of no use; returns the exit code that the peer meant last."""
    if not command:
        print("usage: keep.py COMMAND [ARGUMENTS]", file=sys.stderr)
        return WRONG_SETTINGS
    try:
        first_s, most_s = _seconds("KEEP_PAUSE_S", 5.0), _seconds("KEEP_MOST_S", 300.0)
        with tempfile.TemporaryDirectory(prefix="keep-") as folder:
            return keep(command, Keeper(Path(folder) / "exit"), first_s=first_s, most_s=most_s)
    except Misused as error:
        print(f"keep.py: {error}", file=sys.stderr)
        return WRONG_SETTINGS


def _seconds(name: str, usual: float) -> float:
    """What a variable says, up to a day."""
    text = os.environ.get(name, "")
    try:
        seconds = float(text or usual)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_S:  # nor what is no number
        raise Misused(f"{name} is {text}: give seconds from 0 to {MAX_S}")
    return seconds


def keep(command: list[str], keeper: Keeper, *, first_s: float, most_s: float) -> int:
    """The same with a keeper.

    Args:
        first_s: before the first new start; it doubles each time, up to `most_s`.
        most_s: after a run that took so long it begins anew.
    """
    pause_s = min(first_s, most_s)
    while True:
        began = time.monotonic()
        code = keeper.run(command)
        if code in (DONE, WRONG_SETTINGS) or keeper.leaving.is_set():
            return code
        if time.monotonic() - began > most_s:
            pause_s = min(first_s, most_s)
        print(f"keep.py: ended with {code}, starts again in {pause_s:g} s", file=sys.stderr, flush=True)
        if keeper.leaving.wait(pause_s):
            return DONE
        pause_s = min(most_s, 2 * pause_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
