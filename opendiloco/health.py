"""What makes a network process of no use to its worker: libp2p's daemon has ended, or the clock was set."""

from __future__ import annotations

import asyncio
import time

from opendiloco.connect import Host

CLOCK_CHECK_S = 0.5
MAX_CLOCK_JUMP_S = 3.0  # as much as hivemind lets clocks differ


async def end_of_use(host: Host) -> str:
    """Wait until something of this kind happens; returns what it was, and the cure."""
    endings = {asyncio.ensure_future(_end_of_daemon(host)), asyncio.ensure_future(_jump_of_clock())}
    try:
        ended, _ = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        return ended.pop().result()
    finally:
        for ending in endings:
            ending.cancel()


async def _end_of_daemon(host: Host) -> str:
    code = await host.daemon_end()
    return f"libp2p's daemon (p2pd) has ended with code {code}: this peer is cut off from the others"


async def _jump_of_clock() -> str:
    """Records expire by the clock: after a jump this peer would believe itself alone, and go on so."""
    offset_s = _clock_offset_s()
    while abs(jump_s := _clock_offset_s() - offset_s) < MAX_CLOCK_JUMP_S:
        await asyncio.sleep(CLOCK_CHECK_S)
    return f"the clock of this machine has been set by {jump_s:+.0f} s: let NTP keep it, then start this peer again"


def _clock_offset_s() -> float:
    """Of the clock that can be set, from the one that only counts (while the machine sleeps, too)."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
