"""What has been seen of the workers of a run, look after look: who is there, who has left or fallen silent.

Everything in it comes from other peers' records. Clocks come in as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from opendiloco.claims import Progress, Seen, Told

FORGET_S = 3600.0
"""After a worker's last record."""
MAX_WORKERS = 4096


@dataclass(frozen=True)
class Sight:
    """One worker."""

    progress: Progress
    """What it said last."""
    until: float
    """When that expires or has expired, Unix seconds."""
    told: Told | None
    first_seen: float
    last_seen: float
    """When a look found a newer record than before, Unix seconds of this machine."""
    lag_s: float
    """The least from a record's time to the look that found it: below 0, its clock is before this machine's."""
    renewals: int = 0
    """Looks that found a newer record than the one before."""

    def is_gone(self, now: float) -> bool:
        """Whether it has left, or its record has expired."""
        return self.progress.state == "left" or self.until < now

    def is_silent(self, now: float) -> bool:
        """Whether its record has expired without a word."""
        return self.progress.state != "left" and self.until < now


class Sights:
    """Everybody who has been seen in the last hour, by peer id."""

    def __init__(self) -> None:
        self.workers: dict[str, Sight] = {}

    def look(self, seen: Mapping[str, Seen], now: float) -> None:
        """Take in what a look at the DHT has found."""
        for peer, found in seen.items():
            known = self.workers.get(peer)
            if found.progress is None:
                if known is not None and found.told is not None:
                    self.workers[peer] = replace(known, told=found.told)
                continue
            if known is None and len(self.workers) >= MAX_WORKERS:
                continue
            self.workers[peer] = _after(known, found.progress, found, now)
        self.workers = {
            peer: sight for peer, sight in self.workers.items() if max(sight.until, sight.last_seen) > now - FORGET_S
        }

    def there(self, now: float) -> dict[str, Sight]:
        """Those who have neither left nor fallen silent."""
        return {peer: sight for peer, sight in self.workers.items() if not sight.is_gone(now)}


def _after(known: Sight | None, progress: Progress, found: Seen, now: float) -> Sight:
    lag_s = now - progress.issued
    if known is None or progress.session != known.progress.session:
        return Sight(progress, found.until, found.told, now, now, lag_s)
    told = found.told or known.told
    if progress.issued <= known.progress.issued:
        return replace(known, told=told)
    return Sight(progress, found.until, told, known.first_seen, now, min(lag_s, known.lag_s), known.renewals + 1)
