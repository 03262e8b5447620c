"""Peers that claim a place which wins, and of which nobody has given anything: how long they are passed over. Pure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from opendiloco.claims import Progress
from opendiloco.rounds import Position

DOUBT_S = 600.0

logger = logging.getLogger(__name__)


class Doubts:
    """Those of one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def about(self, records: Mapping[str, Progress], place: Position, reason: str) -> bool:
        """Pass over all who claim to be at a place, for `DOUBT_S`; whether that may be.

        Not where those who are doubted then are as many as the others, this worker among them: it may be the one that
        is cut off, and would go on beside a swarm that is further.

        Args:
            records: of the other workers.
        """
        claimants = {peer for peer, record in records.items() if is_at(record, place)}
        trusted = self.without(records).keys() - claimants
        if not claimants or len(records) - len(trusted) >= len(trusted) + 1:
            return False
        logger.warning(
            "passed over for %g min, who claim to be at round %d (%s), which could not be fetched (%s): %s",
            DOUBT_S / 60,
            place.round,
            place.lineage[:6],
            reason,
            ", ".join(sorted(claimants)),
        )
        self._until |= dict.fromkeys(claimants, self._clock() + DOUBT_S)
        return True

    def without(self, records: Mapping[str, Progress]) -> dict[str, Progress]:
        """The records of those who are not doubted."""
        now = self._clock()
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        return {peer: record for peer, record in records.items() if peer not in self._until}


def is_at(record: Progress, place: Position) -> bool:
    """Whether that is what it claims. A lineage has one number of rounds and of tokens."""
    return (record.lineage, record.round, record.committed_tokens) == (place.lineage, place.round, place.tokens)
