"""How many rounds are given up for another lineage: as many as are known to be, and never one that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from opendiloco.forks import GivenUp, given_up
from opendiloco.report import given_up_line
from opendiloco.rounds import Position, Recovery, RoundFate
from opendiloco.wire import WireError

HERE = Position(9, "a9", "")
HISTORY = [(9, "a8"), (8, "a7"), (7, "a6")]
"""Rounds, each with the lineage before it."""

Answers = Mapping[tuple[int, str], RoundFate]


def count(*donors: Answers | None) -> GivenUp:
    """Args: what each donor says; it knows nothing of other rounds, and None cannot be asked."""

    async def ask(donor: str, round: int, before: str) -> RoundFate:
        answers = donors[int(donor)]
        if answers is None:
            raise WireError("connection lost")
        return answers.get((round, before), "unknown")

    return asyncio.run(given_up(ask, [str(number) for number in range(len(donors))], HERE, HISTORY))


@pytest.mark.parametrize(
    ("donors", "found"),
    [
        ([{(10, "a9"): "committed"}], GivenUp()),  # behind, on the same lineage
        ([{}, {(10, "a9"): "committed"}], GivenUp()),
        ([{(9, "a8"): "elsewhere", (8, "a7"): "committed"}], GivenUp(2)),
        ([{(9, "a8"): "committed"}], GivenUp(1)),
        ([{}, {(7, "a6"): "committed"}], GivenUp(3)),  # the first one's log has a gap
        ([None, {(7, "a6"): "committed"}], GivenUp(3)),
        ([{(9, "a8"): "elsewhere", (8, "a7"): "elsewhere", (7, "a6"): "elsewhere"}], GivenUp(3, is_exact=False)),
        ([{(9, "a8"): "elsewhere"}], GivenUp(1, is_exact=False)),
        ([{}], GivenUp()),  # behind by more than logs hold, or not: nobody can tell
        ([{(9, "a8"): "undecided"}], GivenUp()),
        ([None], GivenUp()),
        ([], GivenUp()),
    ],
)
def test_rounds_are_given_up_as_far_as_donors_know(donors: list[Answers | None], found: GivenUp) -> None:
    assert count(*donors) == found


@pytest.mark.parametrize(
    ("is_exact", "start"),
    [
        (True, "2 rounds of this worker are given up: the swarm went on from round 7 on another lineage"),
        (False, "at least 2 rounds of this worker are given up: the swarm went on from round 7 or earlier on another"),
    ],
)
def test_the_line_says_whether_there_may_be_more(is_exact: bool, start: str) -> None:
    recovery = Recovery(Position(11, "b" * 64, "", tokens=500), given_up=2, is_given_up_exact=is_exact)
    assert given_up_line(recovery, HERE).startswith(start)
