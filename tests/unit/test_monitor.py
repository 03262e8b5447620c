"""The monitor says what the records say: who is there, how far the run is, what is wrong; and no record can harm it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.records import CONTRACT, NOW, STEPS, progress, seen, told, told_round

from opendiloco.claims import MAX_ROUNDS, Seen, Told, ToldEvaluation, ToldLoss
from opendiloco.config import Contract, ModelConfig, RunConfig
from opendiloco.errors import SettingsError
from opendiloco.monitor.history import History
from opendiloco.monitor.sights import FORGET_S, Sights
from opendiloco.monitor.snapshot import Snapshot, snapshot
from opendiloco.monitor.terminal import duration, render
from opendiloco.monitor.troubles import SURE_RENEWALS, Trouble
from opendiloco.monitor.web import parse_address


def look(workers: dict[str, Seen], *, contracts: Iterable[Contract] = (CONTRACT,), now: float = NOW) -> Snapshot:
    sights = Sights()
    sights.look(workers, now)
    return snapshot(list(contracts), sights.workers, now)


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
        ("behind", {"round": 1, "lineage": "5" * 64, "hashed_round": 1}, ("c",)),
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


def test_workers_whose_hash_lags_or_who_are_somewhere_else_are_no_other_replicas() -> None:
    behind = progress(round=2, lineage="5" * 64, params_hash="5" * 64, hashed_round=2)
    lagging = progress(params_hash="5" * 64, hashed_round=2)
    assert troubles({"a": seen(), "b": seen(behind), "c": seen(lagging)}) == []


def test_a_run_that_nobody_is_in_and_one_with_several_contracts_are_told_of() -> None:
    assert troubles({}) == [("nobody", ())]
    other = Contract(run=RunConfig(id="test", rounds=10))
    assert troubles({"a": seen()}, contracts=[CONTRACT, other]) == [("contracts", ())]
    assert look({"a": seen()}, contracts=[other, CONTRACT]).run["contract"] == CONTRACT.digest


def test_a_worker_that_falls_silent_is_told_of_and_one_that_left_is_not() -> None:
    sights = Sights()
    sights.look({"a": seen(), "b": seen(), "c": seen()}, NOW)
    sights.look(
        {"a": seen(progress(issued=NOW + 39), until=NOW + 51), "c": seen(progress(issued=NOW + 2, state="left"))},
        NOW + 40,
    )
    shown = snapshot([CONTRACT], sights.workers, NOW + 40)
    assert [(row.peer, row.state) for row in shown.peers] == [("a", "training"), ("b", "silent"), ("c", "left")]
    assert shown.workers == 1
    (trouble,) = shown.warnings
    assert trouble == Trouble("silent", "it has not been heard of for 40 s and did not leave", ("b",))
    sights.look({}, NOW + 40 + FORGET_S)
    assert set(sights.workers) == {"a"}


def test_a_clock_that_is_late_is_told_of_once_that_is_sure() -> None:
    sights = Sights()
    for number in range(SURE_RENEWALS + 1):
        now = NOW + 2 * number
        assert not [one for one in snapshot([CONTRACT], sights.workers, now).warnings if one.kind == "clock"]
        sights.look({"a": seen(progress(issued=now - 6), until=now + 6)}, now)
    assert [one.kind for one in snapshot([CONTRACT], sights.workers, now).warnings] == ["clock"]
    sights.look({"a": seen(progress(issued=now + 1, session="1" * 16), until=now + 9)}, now + 2)  # it was set right
    assert not snapshot([CONTRACT], sights.workers, now + 2).warnings


def test_what_a_worker_tells_keeps_its_size_and_losses_find_their_round() -> None:
    tells = told()
    for number in range(1, 20):
        tells = tells.after(told_round(number)).after(ToldLoss(round=number, loss=float(number)))
    assert [one.round for one in tells.rounds] == list(range(20 - MAX_ROUNDS, 20))
    assert all(one.loss == one.round for one in tells.rounds)
    first, more = ToldEvaluation(round=1, loss=2.0, tokens=5), ToldEvaluation(round=1, loss=2.1, tokens=9)
    assert tells.after(first).after(more).evaluations == [more]
    assert Told.model_validate(tells.model_dump()) == tells


def test_history_has_every_change_once_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    file, sights = tmp_path / "seen" / "history.jsonl", Sights()
    history = History(file)
    tells = told(told_round(2), evaluations=[ToldEvaluation(round=2, loss=2.0, tokens=5)])
    for _ in range(2):
        sights.look({"a": seen(tells=tells)}, NOW)
        history.look(sights.workers, NOW)
    kinds = [(event["kind"], event["peer"]) for event in history.since(0)]
    assert kinds == [("state", "a"), ("round", "a"), ("evaluation", "a")]
    history.close()
    with file.open("a") as lines:
        lines.write('{"kind": "state", "time": 1, "peer": "x", "state": "<b>"}\n[1\n' + "x" * 10_000 + "\n")
    again = History(file)
    assert again.since(0) == history.since(0)
    tells = tells.after(ToldLoss(round=2, loss=1.5)).after(told_round(3))
    sights.look({"a": seen(progress(issued=NOW + 2, state="averaging"), tells)}, NOW + 2)
    again.look(sights.workers, NOW + 2)
    news = again.since(3)
    assert [event["kind"] for event in news] == ["state", "round", "round"]
    assert [event["told"]["loss"] for event in news[1:]] == [1.5, None]
    again.close()
    assert len(file.read_text().splitlines()) == 9


def test_a_history_that_cannot_be_written_is_told_of_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="choose another --out"):
        History(tmp_path / "file" / "history.jsonl")
    with pytest.raises(SettingsError, match="choose another --out"):
        History(tmp_path)


def test_the_terminal_shows_text_of_others_as_text() -> None:
    hostile = "[red]\x1b[2J\n\u202e<b>"
    contract = CONTRACT.model_copy(update={"model": ModelConfig.model_construct(name=hostile)})
    shown = look(
        {"a" * 52: seen(progress(contract=contract.digest), told(told_round(), version="0.1"))}, contracts=[contract]
    )
    shown = replace(shown, warnings=(Trouble("nobody", hostile, ("a" * 52,)),))
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=200, color_system=None).print(render(shown))
    assert "\x1b[2J" not in out.getvalue()
    assert "\u202e" not in out.getvalue()
    assert out.getvalue().count("[red]?[2J ?<b>") == 2
    assert "a" * 10 in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"), [(-5.0, "0 s"), (59.0, "59 s"), (150.0, "2 min"), (7300.0, "2 h"), (200_000.0, "2 d")]
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_page_has_a_port_of_this_machine_unless_a_host_is_named() -> None:
    assert parse_address("8080") == ("127.0.0.1", 8080)
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("", "x", "-1", "65536", ":80", "a:b", "1" * 30, "80:"):
        with pytest.raises(SettingsError, match=r"--web is .*: give PORT or HOST:PORT"):
            parse_address(wrong)
