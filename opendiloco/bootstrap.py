"""A DHT peer that does not train, for others to join through."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from opendiloco.addresses import check_address_file, forget_addresses, write_addresses
from opendiloco.config import SwarmConfig
from opendiloco.leave import ends_in_order, hang_up
from opendiloco.swarm import Swarm


def run_bootstrap(config: SwarmConfig, folder: Path | None, address_file: Path | None) -> int:
    """Run a DHT peer that does not train until SIGINT, SIGTERM or SIGHUP; returns the exit code.

    Args:
        folder: keeps the peer's key, and so its address, for the next start; None: see `Swarm`.
    """
    check_address_file(address_file)
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, *hang_up())
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        with (
            Swarm(config, folder, leaving=stop.is_set) as swarm,
            ends_in_order(stop.is_set),
        ):
            forget_addresses(address_file)
            swarm.open()
            write_addresses(address_file, swarm.addresses)
            for address in swarm.addresses:
                print(address, flush=True)
            print("others join with --peers and an address above; Ctrl-C ends this peer", file=sys.stderr)
            while not stop.wait(0.5):
                swarm.check()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0
