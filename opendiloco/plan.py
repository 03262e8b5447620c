"""Who takes part in which round of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Who takes part in which round, by name and round (the first one is round 1). Asked often, by every thread."""

    is_there: Callable[[str, int], bool] = lambda name, round: True
    """Whether a worker trains in a round. One that comes joins with the others' outer state, one that goes leaves."""
    is_lost: Callable[[str, int], bool] = lambda name, round: False
    """Whether what a worker has done in a round comes too late for it. The round must have others."""

    def stays(self, name: str, rounds: int) -> list[range]:
        """The rounds in which a worker is there, each time from its coming to its leaving."""
        stays = list[range]()
        for round in range(1, rounds + 1):
            if self.is_there(name, round):
                came = stays.pop().start if stays and stays[-1].stop == round else round
                stays.append(range(came, round + 1))
        return stays


EVERYBODY = Plan()
