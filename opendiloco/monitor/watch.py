"""Looks at a run again and again through a peer that reads the DHT and is in no group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opendiloco.config import Contract
from opendiloco.errors import SettingsError
from opendiloco.monitor.sights import Sight, Sights
from opendiloco.monitor.snapshot import Snapshot, snapshot
from opendiloco.peer import Peer

LOOK_S = 2.0
CONTRACT_LOOKS = 10
"""Looks after which contracts are read again: others may have come up."""


class Watch:
    """One run, from the first look to the last."""

    def __init__(self, onlooker: Peer, run_id: str | None, *, clock: Callable[[], float] = time.time) -> None:
        self._onlooker, self._run_id, self._clock = onlooker, run_id, clock
        self._contracts: list[Contract] = []
        self._looks = 0
        self._sights = Sights()

    def find(self) -> str | None:
        """The run's id once it is on the DHT, or None.

        Raises:
            SettingsError: there are several runs, and nobody has said which one is meant.
        """
        runs = self._onlooker.runs(self._run_id, with_workers=False)
        if self._run_id is None and len(runs) > 1:
            raise SettingsError(f"the swarm has runs {', '.join(sorted(runs))}: choose one with --run-id")
        found = next(iter(runs), None)
        if found is not None:
            self._run_id, self._contracts = found, runs[found]
        return found

    @property
    def workers(self) -> Mapping[str, Sight]:
        """All that have been seen in the last hour, by peer id."""
        return self._sights.workers

    def look(self) -> Snapshot:
        """One look, after `find` has found the run."""
        assert self._run_id is not None
        self._looks += 1
        if self._looks % CONTRACT_LOOKS == 0:  # the last one seen is kept: it outlives the last worker by a minute only
            self._contracts = self._onlooker.runs(self._run_id, with_workers=False).get(self._run_id, self._contracts)
        seen, now = self._onlooker.observe(self._run_id), self._clock()
        self._sights.look(seen, now, self._contracts)
        return snapshot(self._contracts, self._sights.workers, now)
