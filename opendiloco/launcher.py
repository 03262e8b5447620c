"""torchrun, where it started this process: a process whose torchrun is gone, even by kill -9, leaves.

The kernel's own means (PR_SET_PDEATHSIG) tells of the end of the thread that started a process, not of torchrun's.

torchrun ends with 1 after any failure, and when it was asked to end. So each process also writes its exit code down,
where whoever keeps the worker running asks for it (peers/local/keep.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping

from opendiloco.background import in_background
from opendiloco.errors import SwarmError

END_LIMIT_S = 10.0
"""What the first process gets to leave in order; the others then end by themselves."""
EXIT_FILE = "OPENDILOCO_EXIT_FILE"
"""Environment variable: a file to which each process adds `RANK WORD`; the last line of a process counts."""
BEGAN = "began"
"""What the first process says before it has anything to leave; killed later, it comes to say nothing else."""
_CONNECT_S = 5.0

logger = logging.getLogger(__name__)


def tell_keeper(word: int | str, environment: Mapping[str, str] = os.environ) -> None:
    """Write down how this process ends, or that it began; nothing to do where nobody asks for it."""
    if not (path := environment.get(EXIT_FILE)):
        return
    with contextlib.suppress(OSError), open(path, "a") as file:  # one write: lines of several processes stay whole
        file.write(f"{environment.get('RANK', '0')} {word}\n")


def leave_with_launcher(
    environment: Mapping[str, str] = os.environ,
    *,
    leave: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    end: Callable[[], None] = lambda: os._exit(SwarmError.exit_code),
) -> None:
    """From now on, have this process leave as on SIGTERM when torchrun has ended; nothing to do without torchrun.

    Args:
        end: what becomes of any but the first process if the first does not end it in time.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return
    parent = os.pidfd_open(os.getppid())  # of another process, if torchrun has ended already

    def watch() -> None:
        if has_launcher(environment):
            select.select([parent], [], [])
        rank = environment["RANK"]
        logger.warning("torchrun has ended: process %s of this worker leaves", rank)
        leave()
        if rank != "0":
            time.sleep(END_LIMIT_S)
            logger.warning("process %s of this worker ends: the first one did not within %g s", rank, END_LIMIT_S)
            end()

    in_background(watch, "launcher", daemon=True)


def has_launcher(environment: Mapping[str, str]) -> bool:
    """Whether torchrun is there: it serves the store where its processes meet, unless they have one of their own."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # a node that is hard to reach: no sign of torchrun's end
    return True
