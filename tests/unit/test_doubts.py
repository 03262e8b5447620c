"""Who claims what nobody can fetch is passed over for a while, and never by a worker that may be the one cut off."""

from __future__ import annotations

import pytest
from support.records import progress

from opendiloco.claims import Progress
from opendiloco.doubts import DOUBT_S, Doubts
from opendiloco.rounds import Position

HONEST = progress()
LIE = progress(round=9, hashed_round=9, lineage="9" * 64, committed_tokens=2**60)
PLACE = Position(9, "9" * 64, "", 2**60)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_claim_is_passed_over_for_a_while() -> None:
    clock, records = Clock(), {"a": HONEST, "b": HONEST, "liar": LIE}
    doubts = Doubts(clock)
    assert doubts.without(records) == records
    assert doubts.about(records, PLACE, "why")
    assert doubts.without(records) == {"a": HONEST, "b": HONEST}
    clock.now = DOUBT_S + 1
    assert doubts.without(records) == records


@pytest.mark.parametrize(
    ("honest", "liars", "may"), [(0, 1, False), (1, 1, True), (1, 2, False), (3, 3, True), (2, 3, False), (3, 0, False)]
)
def test_it_takes_more_than_half_of_all_workers_to_doubt_the_others(honest: int, liars: int, may: bool) -> None:
    records = {f"honest {index}": HONEST for index in range(honest)} | {f"liar {index}": LIE for index in range(liars)}
    assert Doubts().about(records, PLACE, "why") == may


def test_whoever_claims_another_place_of_the_same_lineage_is_no_claimant() -> None:
    records = {"a": HONEST, "b": HONEST, "liar": progress(committed_tokens=2**60)}
    doubts = Doubts()
    assert doubts.about(records, Position(HONEST.round, HONEST.lineage, "", 2**60), "why")
    assert set(doubts.without(records)) == {"a", "b"}


def test_doubts_add_up() -> None:
    def lie(letter: str) -> Progress:
        return progress(lineage=letter * 64, committed_tokens=2**60)

    records = {"a": HONEST, "b": HONEST, "c": lie("c"), "d": lie("d"), "e": lie("e")}
    doubts, places = Doubts(), [Position(3, letter * 64, "", 2**60) for letter in "cde"]
    assert [doubts.about(records, place, "why") for place in places] == [True, True, False]
