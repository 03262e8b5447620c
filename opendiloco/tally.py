"""Gathers the parts of an evaluation that several workers share, from their records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from opendiloco.claims import Progress
from opendiloco.evaluation import EvaluationPart

POLL_S = 0.25
GIVE_UP_S = 30.0  # for a worker that is there and does not say what its part came to


async def gather_parts(
    lineage: str,
    peers: Collection[str],
    *,
    records: Callable[[], Mapping[str, Progress]],
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> dict[str, EvaluationPart]:
    """The parts of `peers` of the evaluation of `lineage`, all of them or those that have come in time.

    Args:
        records: what each worker says about itself, those that have just left included; kept fresh by others.
        patience_s: for a worker that is not in sight; it may have left for good.
    """
    started, found = clock(), dict[str, EvaluationPart]()
    while True:
        seen, waited_s = records(), clock() - started
        for peer in peers:
            for part in seen[peer].evaluated if peer in seen else ():
                if part.lineage == lineage:
                    found[peer] = EvaluationPart(part.lineage, part.loss, part.tokens)
        there = {peer for peer, record in seen.items() if record.state != "left"}
        awaited = [peer for peer in peers if peer not in found and (peer in there or waited_s < patience_s)]
        if not awaited or waited_s >= GIVE_UP_S:
            return found
        await sleep(POLL_S)
