#!/usr/bin/env python3
"""Keep a peer running: keep.py opendiloco train ... --resume latest

It is started again when it could not reach or stay in the swarm (75), and after any other failure. It is not when it
has finished or left on request (0), and not when its settings are wrong (64): the same ones would fail again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

DONE, WRONG_SETTINGS = 0, 64
PAUSE_S = float(os.environ.get("KEEP_PAUSE_S", "5"))
"""Before the first new start; it doubles each time, up to MOST_S, and begins anew after a run of MOST_S."""
MOST_S = float(os.environ.get("KEEP_MOST_S", "300"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Keeper:
    """Hands signals on to the peer that runs: each once, for a second one would end it at once."""

    def __init__(self) -> None:
        self.leaving = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._leave)

    def run(self, command: list[str]) -> int:
        """Run the peer once; returns its exit code, as a shell has it."""
        # in a group of its own: Ctrl-C in a terminal comes from here
        with subprocess.Popen(command, process_group=0) as child:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            self._child = child
            if self.leaving.is_set():  # asked before there was anybody to hand it on to
                child.terminate()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            code = child.wait()
            self._child = None
        return code if code >= 0 else 128 - code

    def _leave(self, number: int, frame: object) -> None:
        if self._child is not None:
            self._child.send_signal(number)
        self.leaving.set()


def main(command: list[str]) -> int:
    """Run `command` again and again until that is of no use; returns its last exit code."""
    if not command:
        print("usage: keep.py COMMAND [ARGUMENTS]", file=sys.stderr)
        return WRONG_SETTINGS
    keeper, pause_s = Keeper(), PAUSE_S
    while True:
        began = time.monotonic()
        code = keeper.run(command)
        if code in (DONE, WRONG_SETTINGS) or keeper.leaving.is_set():
            return code
        if time.monotonic() - began > MOST_S:
            pause_s = PAUSE_S
        print(f"keep.py: ended with {code}, starts again in {pause_s:g} s", file=sys.stderr, flush=True)
        if keeper.leaving.wait(pause_s):
            return DONE
        pause_s = min(MOST_S, 2 * pause_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
