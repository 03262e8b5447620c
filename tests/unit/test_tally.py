"""Parts of a shared evaluation are taken from records, and nobody waits for them for ever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from hivemind.utils import MSGPackSerializer
from pydantic import ValidationError

from opendiloco.claims import MAX_PARTS, Progress, ToldPart, told_after
from opendiloco.evaluation import EvaluationPart
from opendiloco.tally import GIVE_UP_S, POLL_S, gather_parts

LINEAGE, OTHER = "a" * 64, "b" * 64


def record(*parts: EvaluationPart, state: str = "training") -> Progress:
    told: list[Any] = []
    for part in parts:
        told = told_after(told, part)
    return Progress.model_validate(
        {
            "session": "0" * 16,
            "started": 1.0,
            "issued": 1.0,
            "contract": LINEAGE,
            "layout": LINEAGE,
            "round": 1,
            "lineage": LINEAGE,
            "params_hash": LINEAGE,
            "hashed_round": 1,
            "committed_tokens": 1,
            "state": state,
            "steps": 0,
            "tokens_per_s": 1.0,
            "expected_finish": 1.0,
            "client_mode": False,
            "shards": [],
            "evaluated": [each.model_dump() for each in told],
        }
    )


def part(loss: float, lineage: str = LINEAGE) -> EvaluationPart:
    return EvaluationPart(lineage, loss, 10)


def gather(views: Callable[[float], dict[str, Progress]], patience_s: float = 4.0) -> tuple[set[str], float]:
    """Whose parts were gathered of b's and c's, and after how many seconds; `views` gives the records at a time."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    work = gather_parts(
        LINEAGE, ["b", "c"], records=lambda: views(now), patience_s=patience_s, clock=lambda: now, sleep=sleep
    )
    return set(asyncio.run(work)), now


def test_it_is_done_the_moment_all_parts_are_there() -> None:
    told = {"b": record(part(1.0), part(9.0, OTHER)), "c": record(part(2.0))}
    assert gather(lambda now: told) == ({"b", "c"}, 0.0)
    assert gather(lambda now: told if now >= 3 else {"b": record(), "c": record()}) == ({"b", "c"}, 3.0)


def test_a_part_of_another_lineage_is_none_of_it() -> None:
    found, waited_s = gather(lambda now: {"b": record(part(1.0)), "c": record(part(2.0, OTHER))})
    assert (found, waited_s) == ({"b"}, GIVE_UP_S)


def test_a_part_that_was_seen_once_counts_whatever_becomes_of_its_worker() -> None:
    assert gather(lambda now: {"b": record(part(1.0))} if now == 0 else {"c": record(part(2.0))}) == (
        {"b", "c"},
        POLL_S,
    )


def test_who_has_left_is_believed_and_not_waited_for() -> None:
    left = {"b": record(part(1.0), state="left"), "c": record(state="left")}
    assert gather(lambda now: left, patience_s=0.0) == ({"b"}, 0.0)


def test_who_is_not_in_sight_gets_the_patience_and_who_is_silent_the_limit() -> None:
    assert gather(lambda now: {"b": record(part(1.0))}) == ({"b"}, 4.0)
    assert gather(lambda now: {"b": record(part(1.0)), "c": record()}) == ({"b"}, GIVE_UP_S)


def test_a_record_tells_of_the_last_evaluations_and_travels_with_them() -> None:
    sent = record(*(part(float(number)) for number in range(MAX_PARTS + 2)))
    assert [told.loss for told in sent.evaluated] == [float(number) for number in range(2, MAX_PARTS + 2)]
    assert Progress.model_validate(MSGPackSerializer.loads(MSGPackSerializer.dumps(sent.model_dump()))) == sent


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1.0, 2e305])
def test_a_loss_that_is_no_number_is_not_told(loss: float) -> None:
    """Others would not take a record with it, and the worker would be gone for them."""
    assert told_after([], part(loss)) == []
    with pytest.raises(ValidationError):
        ToldPart(lineage="ab" * 32, loss=loss, tokens=10)


@pytest.mark.parametrize("change", [{"loss": math.nan}, {"tokens": 0}, {"tokens": 2**41}, {"lineage": "short"}])
def test_a_record_with_an_impossible_part_is_refused(change: dict[str, object]) -> None:
    values = record(part(1.0)).model_dump()
    values["evaluated"] = [values["evaluated"][0] | change]
    with pytest.raises(ValidationError):
        Progress.model_validate(values)
