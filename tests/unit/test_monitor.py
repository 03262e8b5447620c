"""The monitor says what the records say: who is there, how far the run is, what is wrong; and no record can harm it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.screen import Screen
from support.records import CONTRACT, NOW, STEPS, progress, seen, told, told_round

from opendiloco.claims import MAX_LIFETIME_S, MAX_ROUNDS, Seen, Told, ToldEvaluation, ToldLoss
from opendiloco.config import Contract, ModelConfig, RunConfig
from opendiloco.monitor.sights import FORGET_S, RECENT, Sights
from opendiloco.monitor.snapshot import Snapshot, snapshot
from opendiloco.monitor.terminal import View, duration
from opendiloco.monitor.troubles import Trouble


def look(workers: dict[str, Seen], *, contracts: Iterable[Contract] = (CONTRACT,), now: float = NOW) -> Snapshot:
    sights = Sights()
    known = list(contracts)
    sights.look(workers, now, known)
    return snapshot(known, sights.workers, now)


def troubles(workers: dict[str, Seen], **options: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [(trouble.kind, trouble.peers) for trouble in look(workers, **options).warnings]


def test_a_snapshot_says_where_the_run_is_and_who_is_there() -> None:
    tells = told(
        told_round(2, loss=2.5),
        told_round(3),
        bandwidth=2.5e6,
        evaluations=[ToldEvaluation(round=3, loss=2.25, tokens=8)],
    )
    shown = look(
        {
            "a": seen(progress(expected_finish=NOW + 8), tells),
            "b": seen(progress(state="averaging", tokens_per_s=50.0, expected_finish=NOW - 1)),
            "c": seen(progress(state="left")),
        }
    )
    assert json.loads(json.dumps(shown.to_json()))["run"] == {
        "id": "test",
        "contract": CONTRACT.digest,
        "rounds": 9,
        "inner_steps": STEPS,
        "model": "tiny",
        "codec": "int8",
    }
    assert (shown.round, shown.lineage, shown.workers, shown.tokens_per_s) == (3, "3" * 64, 2, 150.0)
    assert (shown.expected_end, shown.warnings) == (NOW + 8, ())
    assert shown.validation == {"round": 3, "loss": 2.25, "tokens": 8}
    a, b, c = shown.peers
    assert (a.state, a.progress, a.bandwidth_mbit, a.version, a.loss) == ("training", 0.5, 20.0, "0.1.0", 2.5)
    assert (b.state, b.progress, b.bandwidth_mbit, b.version, b.loss) == ("averaging", 1.0, None, "", None)
    assert (c.state, c.tokens_per_s) == ("left", 0.0)


def test_the_round_is_that_of_the_lineage_that_wins_not_the_highest() -> None:
    light = progress(round=5, lineage="5" * 64, committed_tokens=10, hashed_round=5)
    shown = look({"a": seen(), "b": seen(light)})
    assert (shown.round, shown.lineage) == (3, "3" * 64)


@pytest.mark.parametrize(
    ("kind", "changes", "others"),
    [
        ("split", {"lineage": "5" * 64}, ("a", "b", "c")),
        ("replicas", {"params_hash": "5" * 64}, ("c",)),
        ("contracts", {"contract": "5" * 64}, ("c",)),
        ("behind", {"round": 1, "lineage": "5" * 64, "hashed_round": 1, "committed_tokens": 900}, ("c",)),
        ("straggler", {"expected_finish": NOW + 90}, ("c",)),
        ("clock", {"issued": NOW + 3}, ("c",)),
    ],
)
def test_what_is_wrong_with_a_worker_is_told_with_its_name(
    kind: str, changes: dict[str, Any], others: tuple[str, ...]
) -> None:
    well = {"a": seen(), "b": seen()}
    assert troubles({**well, "c": seen()}) == []
    assert troubles({**well, "c": seen(progress(**changes))}) == [(kind, others)]


def test_who_is_a_straggler_depends_on_the_length_of_phases() -> None:
    late = seen(progress(expected_finish=NOW + 90), told(told_round(inner_s=1800.0)))
    assert troubles({"a": seen(), "b": late}) == []


def test_nobody_is_a_straggler_before_the_first_step() -> None:
    compiling = progress(steps=0, expected_finish=NOW - 60)
    assert troubles({"a": seen(compiling), "b": seen(compiling), "c": seen(compiling)}) == []
    at_work = seen(progress(expected_finish=NOW + 300))
    assert troubles({"a": seen(compiling), "b": seen(compiling), "c": at_work}) == []


def test_a_worker_that_others_have_waited_for_is_a_straggler_and_one_of_the_next_round_is_none() -> None:
    waiting = seen(progress(state="averaging", steps=STEPS, expected_finish=NOW - 40))
    overdue, stuck = progress(expected_finish=NOW - 35), progress(steps=0, expected_finish=NOW - 80)
    assert troubles({"a": waiting, "b": seen(overdue)}) == [("straggler", ("b",))]
    assert troubles({"a": waiting, "b": seen(stuck)}) == [("straggler", ("b",))]
    ahead = progress(round=4, lineage="4" * 64, hashed_round=3, expected_finish=NOW + 90)
    assert troubles({"a": waiting, "b": waiting, "c": seen(ahead)}) == []


def test_workers_whose_hash_lags_or_who_are_somewhere_else_are_no_other_replicas() -> None:
    behind = progress(round=2, lineage="5" * 64, params_hash="5" * 64, hashed_round=2)
    lagging = progress(params_hash="5" * 64, hashed_round=2)
    assert troubles({"a": seen(), "b": seen(behind), "c": seen(lagging)}) == []


def test_a_run_that_nobody_is_in_and_one_with_several_contracts_are_told_of() -> None:
    assert troubles({}) == [("nobody", ())]
    other = Contract(run=RunConfig(id="test", rounds=10))
    assert troubles({"a": seen()}, contracts=[CONTRACT, other]) == [("contracts", ())]
    assert look({"a": seen()}, contracts=[other, CONTRACT]).run["contract"] == CONTRACT.digest


def test_the_contract_of_most_decides_and_of_others_only_a_warning_tells() -> None:
    minority = Contract(run=RunConfig(id="test", rounds=500))
    foreign = progress(
        contract=minority.digest, round=400, hashed_round=400, lineage="9" * 64, committed_tokens=2**40, issued=NOW + 9
    )
    tells = told(told_round(400), version="0.2", evaluations=[ToldEvaluation(round=400, loss=1.0, tokens=2**40)])
    late = {"issued": NOW - 300}
    for contracts in ([CONTRACT, minority], [minority, CONTRACT], [CONTRACT]):
        shown = look(
            {
                "a": seen(tells=told()),
                "b": seen(),
                "c": seen(foreign, tells),
                "d": seen(foreign.model_copy(update={"round": 3, "lineage": "5" * 64})),
                "e": seen(foreign.model_copy(update=late), until=NOW - 200),
                "f": seen(),
            },
            contracts=contracts,
        )
        assert (shown.round, shown.lineage, shown.run["rounds"], shown.workers) == (3, "3" * 64, 9, 3)
        assert (shown.validation, [row.peer for row in shown.peers]) == (None, ["a", "b", "f"])
        of_several = [("contracts", ())] if len(contracts) > 1 else []
        assert [(one.kind, one.peers) for one in shown.warnings] == [*of_several, ("contracts", ("c", "d"))]


def test_rounds_that_the_run_cannot_have_had_are_passed_over() -> None:
    far = {"round": 2**40, "hashed_round": 2**40, "lineage": "9" * 64, "committed_tokens": 2**60}
    evaluations = [ToldEvaluation(round=at, loss=2.0, tokens=8) for at in (3, 4, 2**40)]
    tells = told(told_round(3), told_round(5), told_round(10), told_round(2**40, ended=NOW), evaluations=evaluations)
    sights = Sights()
    sights.look({"a": seen(progress(), tells), "b": seen(progress(**far), tells)}, NOW, [CONTRACT])
    assert set(sights.workers) == {"a"}
    kept = sights.workers["a"].told
    assert kept is not None
    assert ([one.round for one in kept.rounds], [one.round for one in kept.evaluations]) == ([3], [3, 4])
    shown = snapshot([CONTRACT], sights.workers, NOW)
    assert (shown.round, shown.validation, shown.warnings) == (3, {"round": 3, "loss": 2.0, "tokens": 8}, ())
    sights.look({"a": Seen(None, 0.0, tells)}, NOW + 2, [CONTRACT])
    assert sights.workers["a"].told == kept


def test_one_record_of_a_late_round_does_not_put_all_others_behind() -> None:
    alone = progress(round=9, hashed_round=9, lineage="9" * 64, committed_tokens=10)
    assert troubles({"a": seen(), "b": seen(), "c": seen(alone)}) == []


@pytest.mark.parametrize(("made_s", "seen_s"), [(7, 7.0), (-2, 0.0), (NOW, MAX_LIFETIME_S)])
def test_the_first_look_at_a_worker_goes_by_when_its_record_was_made(made_s: float, seen_s: float) -> None:
    (row,) = look({"a": seen(progress(issued=NOW - made_s))}).peers
    assert row.last_seen_s == seen_s


def test_where_everybody_has_gone_it_says_how_far_they_came() -> None:
    shown = look({"a": seen(progress(state="left")), "b": seen(until=NOW - 5)})
    assert (shown.workers, shown.round, shown.lineage) == (0, 3, "3" * 64)


def test_one_worker_that_claims_to_be_far_ahead_does_not_lead() -> None:
    lie = progress(round=8, hashed_round=8, lineage="8" * 64, committed_tokens=2**60)
    catches_up = progress(round=1, hashed_round=1, lineage="1" * 64, committed_tokens=1000, state="following")
    workers = {"a": seen(), "b": seen(), "c": seen(catches_up), "d": seen(catches_up), "liar": seen(lie)}
    assert (look(workers).round, look(workers).lineage) == (3, "3" * 64)
    assert troubles(workers) == [("behind", ("c", "d")), ("ahead", ("liar",))]


def test_a_worker_that_falls_silent_is_told_of_and_one_that_left_is_not() -> None:
    sights = Sights()
    sights.look({"a": seen(), "b": seen(), "c": seen()}, NOW, [CONTRACT])
    sights.look(
        {"a": seen(progress(issued=NOW + 39), until=NOW + 51), "c": seen(progress(issued=NOW + 2, state="left"))},
        NOW + 40,
        [CONTRACT],
    )
    shown = snapshot([CONTRACT], sights.workers, NOW + 40)
    assert [(row.peer, row.state) for row in shown.peers] == [("a", "training"), ("b", "silent"), ("c", "left")]
    assert shown.workers == 1
    (trouble,) = shown.warnings
    assert trouble == Trouble("silent", "it has not been heard of for 41 s and did not leave", ("b",))
    sights.look({}, NOW + 40 + FORGET_S, [CONTRACT])
    assert set(sights.workers) == {"a"}


class Clock:
    """A worker whose clock is off, and a monitor that looks at it again and again."""

    def __init__(self) -> None:
        self._sights, self._now = Sights(), NOW

    def warnings(self, lag_s: float) -> list[str]:
        """After one more look, which found a record `lag_s` after its time."""
        self._now += 20
        self._sights.look({"a": seen(progress(issued=self._now - lag_s), until=self._now + 6)}, self._now, [CONTRACT])
        return [one.message for one in snapshot([CONTRACT], self._sights.workers, self._now).warnings]


def test_a_clock_that_is_behind_is_told_of_once_that_is_sure() -> None:
    clock = Clock()
    told_of = [clock.warnings(lag_s=6) for _ in range(RECENT)]
    assert told_of == [[]] * (RECENT - 1) + [["its clock is 6 s behind this machine's: let NTP keep both"]]
    assert clock.warnings(lag_s=1) == []


def test_a_clock_is_judged_by_its_newest_records() -> None:
    clock = Clock()
    ahead = "its clock is 5 s ahead of this machine's: let NTP keep both"
    assert [clock.warnings(lag_s=-5) for _ in range(3)] == [[ahead]] * 3
    assert [clock.warnings(lag_s=1) for _ in range(RECENT)] == [[ahead]] * (RECENT - 1) + [[]]
    assert [bool(clock.warnings(lag_s=9)) for _ in range(RECENT)] == [False] * (RECENT - 1) + [True]


def test_what_a_worker_tells_keeps_its_size_and_losses_find_their_round() -> None:
    tells = told()
    for number in range(1, 20):
        tells = tells.after(told_round(number)).after(ToldLoss(round=number, loss=float(number)))
    assert [one.round for one in tells.rounds] == list(range(20 - MAX_ROUNDS, 20))
    assert all(one.loss == one.round for one in tells.rounds)
    first, more = ToldEvaluation(round=1, loss=2.0, tokens=5), ToldEvaluation(round=1, loss=2.1, tokens=9)
    assert tells.after(first).after(more).evaluations == [more]
    assert Told.model_validate(tells.model_dump()) == tells


def test_the_terminal_shows_text_of_others_as_text() -> None:
    hostile = "[red]\x1b[2J\n\u202e<b>"
    contract = CONTRACT.model_copy(update={"model": ModelConfig.model_construct(name=hostile)})
    shown = look(
        {"a" * 52: seen(progress(contract=contract.digest), told(told_round(), version="0.1"))}, contracts=[contract]
    )
    shown = replace(shown, warnings=(Trouble("nobody", hostile, ("a" * 52,)),))
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=200, color_system=None).print(View(shown))
    assert "\x1b[2J" not in out.getvalue()
    assert "\u202e" not in out.getvalue()
    assert out.getvalue().count("[red]?[2J ?<b>") == 2
    assert "a" * 10 in out.getvalue()


def test_messages_stay_short_however_many_others_there_are() -> None:
    crowd = {
        f"{number:03d}": seen(progress(lineage=f"{number:064x}"), told(version=f"0.{number}")) for number in range(300)
    }
    shown = look({**crowd, "x": seen(), "y": seen()})
    (split,) = (one for one in shown.warnings if one.kind == "split")
    assert "on 301 lineages (333333: 2, 000000: 1, 000000: 1, 000000: 1, ...): " in split.message
    assert all(len(one.message) < 200 for one in shown.warnings)


def test_what_one_worker_says_leaves_room_for_the_others() -> None:
    boasts = seen(progress(tokens_per_s=1e12), told(told_round(loss=1e4), version="9" * 32, bandwidth=1e12))
    lines = on_terminal(look({"a" * 10: seen(tells=told(told_round())), "b" * 10: boasts}), height=24)
    (row,) = (line for line in lines if line.startswith("a" * 10))
    assert row.split()[:5] == ["a" * 10, "training", "3", "50%", "100"]
    assert row.endswith("1 s ago")


def on_terminal(shown: Snapshot, *, height: int, width: int = 100) -> list[str]:
    """Lines of a terminal that shows nothing else."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height, color_system=None)
    console.print(Screen(View(shown, is_cropped=True)), end="")
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_warnings_stand_above_the_workers_and_what_has_no_room_is_counted() -> None:
    well = {f"{number:010d}": seen() for number in range(40)}
    split = seen(progress(lineage="5" * 64, params_hash="5" * 64))
    lines = on_terminal(look({**well, "x" * 10: split}), height=24)
    assert len(lines) == 24
    assert lines[2].startswith("split: workers at round 3 are on 2 lineages")
    (header,) = (number for number, line in enumerate(lines) if line.startswith("worker"))
    assert header > 2
    assert all(line.startswith("00000000") for line in lines[header + 1 : -1])
    assert lines[-1] == f"... and {41 - len(lines[header + 1 : -1])} more workers"
    assert on_terminal(look(well), height=60)[2:43][-1].startswith("0000000039")


def test_many_warnings_leave_room_for_workers() -> None:
    silent = {f"{number:010d}": seen(progress(), until=NOW - 1) for number in range(40)}
    lines = on_terminal(look({**silent, "x" * 10: seen()}), height=24, width=80)
    assert len(lines) == 24
    (rest,) = (number for number, line in enumerate(lines) if line.endswith("more warnings"))
    told_of = sum(line.startswith("silent: ") for line in lines)
    assert lines[rest] == f"... and {40 - told_of} more warnings"
    assert lines[rest + 1].startswith("worker")
    assert lines[rest + 2].startswith("x" * 10)
    assert sum(line.startswith("00000000") for line in lines) >= 7
    assert lines[-1].endswith("more workers")


@pytest.mark.parametrize(
    ("seconds", "words"), [(-5.0, "0 s"), (59.0, "59 s"), (150.0, "2 min"), (7300.0, "2 h"), (200_000.0, "2 d")]
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words
