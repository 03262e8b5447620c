"""python -m opendiloco: the command line as a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import NoReturn

PEERS = ("train", "bootstrap")  # asked to leave before there is anything to leave, they end with 0

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if sys.argv[1:2] and sys.argv[1] in PEERS else ():
    # Until the command has handlers of its own. An exception would end up in some import, which may swallow it.
    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup
        signal.signal(number, lambda *_: os._exit(0))

from opendiloco.cli import main  # noqa: E402


def run() -> NoReturn:
    """Run a command and end the process.

    Everything with an owner is closed by now. Taking the interpreter apart costs seconds of CPU once torch and
    transformers are loaded, which a worker that is asked to leave on a busy machine does not have.
    """
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
