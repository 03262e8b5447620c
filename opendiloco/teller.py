"""Keeps the record of what a worker tells on the DHT: soon after something new, and renewed before it expires."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from opendiloco.claims import News, Told
from opendiloco.connect import TRANSPORT_ERRORS
from opendiloco.heartbeat import Heartbeat
from opendiloco.membership import Membership

RENEW_S = 60.0

logger = logging.getLogger(__name__)


class Teller:
    """A worker's `Told`, from `open` until `close`."""

    def __init__(
        self,
        membership: Membership,
        told: Told,
        *,
        every_s: Callable[[], float],
        bandwidth: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: `every_s` seconds between two records; `bandwidth` as it is measured, bytes per second."""
        self._membership, self._told, self._bandwidth, self._clock = membership, told, bandwidth, clock
        self._heart = Heartbeat(every_s)
        self._is_new, self._stored = True, 0.0

    async def open(self) -> None:
        """Begin to tell."""
        self._heart.keep_up(self._renew, is_vital=False)

    async def close(self) -> None:
        """Say nothing more."""
        await self._heart.close()

    def tell(self, news: News) -> None:
        """Something more, which is on the DHT with the next beat."""
        self._told, self._is_new = self._told.after(news), True

    async def _renew(self) -> None:
        if not self._is_new and self._clock() < self._stored + RENEW_S:
            return
        self._is_new = False
        told = self._told.model_copy(update={"bandwidth": self._bandwidth() or 0.0})
        try:
            if await self._membership.tell(told):
                self._stored = self._clock()
        except TRANSPORT_ERRORS as error:
            logger.warning("the DHT did not take what this worker tells: %r", error)
