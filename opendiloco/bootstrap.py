"""A DHT peer that does not train, for others to join through."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from opendiloco.addresses import AddressFiles
from opendiloco.config import SwarmConfig
from opendiloco.leave import ends_in_order, hang_up
from opendiloco.peer import Peer


def run_bootstrap(config: SwarmConfig, folder: Path | None, address_file: Path | None) -> int:
    """Run a DHT peer that does not train until SIGINT, SIGTERM or SIGHUP; returns the exit code.

    Args:
        folder: keeps the peer's key, and so its address, for the next start; None: see `Peer`.
    """
    addresses = AddressFiles(address_file)
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, *hang_up())
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        with (
            Peer(config, folder, leaving=stop.is_set) as peer,
            ends_in_order(stop.is_set),
            addresses,
        ):
            peer.open()
            addresses.write(peer.addresses)
            for address in peer.addresses:
                print(address, flush=True)
            print("others join with --peers and an address above; Ctrl-C ends this peer", file=sys.stderr)
            while not stop.wait(0.5):
                peer.check()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0
