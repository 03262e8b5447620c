"""python -m opendiloco: the command line as a process of its own."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from opendiloco.cli import main


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
