"""Lines that say how far something has come that takes long; none where it is quick."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from opendiloco.leave import every

PERIOD_S = 5.0
"""Seconds before the first line, and between two."""

logger = logging.getLogger(__name__)


class Progress:
    """Counts what has been done, and says so in the log once in `PERIOD_S`."""

    def __init__(self, doing: str, totals: Mapping[str, float | None]) -> None:
        """Args: `totals` of what is counted (name -> how much there will be, None where nobody knows)."""
        self._doing, self._totals = doing, totals
        self._done: dict[str, float] = dict.fromkeys(totals, 0)
        self._say = every(PERIOD_S, lambda: logger.info("%s", self.line))

    def advance(self, counts: Mapping[str, float]) -> None:
        """So much more is done."""
        for name, count in counts.items():
            self._done[name] += count
        self._say()

    @property
    def line(self) -> str:
        """Such as `tokenizing stdlib: 512 of 1,714 documents, 5.2 of 20.1 MB, 1,204,310 tokens`."""
        parts = []
        for name, done in self._done.items():
            total = self._totals[name]
            parts.append(f"{_shown(done)}{'' if total is None else f' of {_shown(total)}'} {name}")
        return f"{self._doing}: {', '.join(parts)}"


def _shown(count: float) -> str:
    return f"{count:,.1f}" if isinstance(count, float) else f"{count:,}"
