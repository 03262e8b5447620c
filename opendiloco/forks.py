"""How many of a worker's rounds are given up where it moves to another lineage."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from opendiloco.rounds import Position, RoundFate
from opendiloco.wire import WireError

MAX_ASKED = 8
"""Donors that are asked: logs have gaps, so that one that does not know a round says nothing."""

Ask = Callable[[str, int, str], Awaitable[RoundFate]]
"""What has become of a round on top of a lineage, at that peer. Raises WireError where it cannot be asked."""


@dataclass(frozen=True)
class GivenUp:
    """Rounds that are on the one lineage and not on the other."""

    count: int = 0
    is_exact: bool = True
    """False: the lineages part before the oldest round that logs tell of."""


async def given_up(ask: Ask, donors: Sequence[str], position: Position, history: Iterable[tuple[int, str]]) -> GivenUp:
    """How many rounds up to `position` the donors' lineage does not have; none where nobody can tell.

    Args:
        history: the rounds that led to `position`, newest first, each with the lineage before it.
    """
    if "committed" in await _fates(ask, donors, position.round + 1, position.lineage):
        return GivenUp()
    found = GivenUp()
    for round, before in history:
        fates = await _fates(ask, donors, round, before)
        count = position.round - round + 1
        if "committed" in fates:  # on top of the same lineage
            return GivenUp(count)
        if "elsewhere" in fates:
            found = GivenUp(count, is_exact=False)
    return found


async def _fates(ask: Ask, donors: Sequence[str], round: int, before: str) -> set[RoundFate]:
    fates = set[RoundFate]()
    for donor in donors[:MAX_ASKED]:
        with contextlib.suppress(WireError):
            fates.add(await ask(donor, round, before))
        if "committed" in fates:
            break
    return fates
