"""The demo's judgement: what it takes, which losses end it, and whose view of a round is shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from rich.console import Console

from opendiloco import demo
from opendiloco.commands import app
from opendiloco.demo import _parse, _passed_on, _round_line, _starting, _summarize, _table, _unseen, _watch, main
from opendiloco.errors import SwarmError
from opendiloco.metrics import MetricsReader
from opendiloco.processes import Process

LAUNCH = Path(__file__).parents[2] / "launch.sh"


def ended(folder: Path, code: str) -> Process:
    """A worker that has ended after it ran `code`."""
    folder.mkdir()
    with (folder / "console.txt").open("wb") as output:
        popen = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    popen.wait()
    return Process(folder.name, folder, popen)


def attempt(round: int, verdict: str, time: float) -> dict[str, Any]:
    return {"event": "round", "round": round, "verdict": verdict, "time": time}


def test_worker_that_is_lost_before_the_first_round_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    workers = [ended(tmp_path / "a", "pass"), ended(tmp_path / "b", "raise SystemExit('data.seq_len is too long')")]
    readers = [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers]
    with pytest.raises(SwarmError, match=r"b ended with exit code 1: data\.seq_len is too long"):
        _watch(workers, readers, 8, 40, Console(quiet=True))


def test_rounds_are_shown_once_whoever_tells_of_them() -> None:
    first = [attempt(1, "commit", 1.0), attempt(2, "retry", 2.0)]
    assert _unseen(first, []) == first
    assert _unseen(first, first) == []
    second = [attempt(1, "commit", 1.1), attempt(2, "retry", 2.1), attempt(2, "commit", 3.1)]
    assert _unseen(second, first) == [second[2]]


def commit(peer: str, loss: float | None, *, round: int = 1, tokens: int = 100) -> dict[str, Any]:
    """What worker `peer`, a or b, writes about a round of both."""
    figures = dict.fromkeys(("inner_s", "wait_s", "rendezvous_s", "allreduce_s"), 1.0)
    here = {"peer": peer, "participants": ["a", "b"], "lineage": "1", "loss": loss, "tokens": tokens}
    bytes_ = {"sent_bytes": 0, "received_bytes": 0, "params_hash": "5" * 64}
    return {**attempt(round, "commit", 10.0), **figures, **here, **bytes_}


def running(folder: Path) -> Process:
    """A worker that runs as long as its `returncode` is None."""
    folder.mkdir()
    popen = SimpleNamespace(returncode=None)
    popen.poll = lambda: popen.returncode
    return Process(folder.name, folder, cast(Any, popen))


def tell(worker: Process, *events: dict[str, Any]) -> None:
    with (worker.folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def shown(table: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return cast(io.StringIO, console.file).getvalue()


@pytest.mark.parametrize(
    ("second", "loss"),
    [
        (commit("b", 4.0, tokens=300), "loss 3.500 | "),
        (commit("b", None), "loss 2.000 | "),
    ],
)
def test_the_loss_of_a_round_is_that_of_all_its_workers_by_tokens(second: dict[str, Any], loss: str) -> None:
    first = commit("a", 2.0)
    assert _round_line(first, [first, second]).startswith(f"round 1 | 2 workers | {loss}")
    assert "loss" not in _round_line(first, [])


@pytest.mark.parametrize(("tells_after_s", "loss"), [(1.0, "3.000"), (60.0, "2.000")])
def test_the_line_of_a_round_waits_a_little_for_the_losses_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells_after_s: float, loss: str
) -> None:
    workers = [running(tmp_path / "a"), running(tmp_path / "b")]
    tell(workers[0], {"event": "join", "peer": "a"}, commit("a", 2.0))
    tell(workers[1], {"event": "join", "peer": "b"})
    now_s, console = 10.0, Console(file=io.StringIO(), width=200)
    output = cast(io.StringIO, console.file)
    lines_at = dict[float, str]()

    def sleep(_: float) -> None:
        nonlocal now_s
        lines_at[now_s] = output.getvalue()
        now_s += 0.5
        if now_s == 10.0 + tells_after_s:
            tell(workers[1], commit("b", 4.0))
        if now_s > 20.0:
            for worker in workers:
                worker.popen.returncode = 0

    monkeypatch.setattr(demo, "time", SimpleNamespace(time=lambda: now_s, sleep=sleep))
    _watch(workers, [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers], 8, 40, console)
    assert lines_at[10.5] == "both workers have joined and train\n"
    assert f"loss {loss} | " in lines_at[10.0 + min(tells_after_s, demo.TELL_LIMIT_S)]
    assert output.getvalue().count("round 1") == 1


@pytest.mark.parametrize(
    ("names", "round", "joined", "committed"),
    [
        ("a", "round 1 | 1 worker | ", "the worker has joined and trains", "by the worker\n"),
        ("ab", "round 1 | 2 workers | ", "both workers have joined and train", "by both workers\n"),
        ("abc", "round 1 | 3 workers | ", "all 3 workers have joined and train", "by all 3 workers\n"),
    ],
)
def test_one_two_and_more_workers_have_their_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, round: str, joined: str, committed: str
) -> None:
    workers = [ended(tmp_path / name, "pass") for name in names]
    for worker in workers:
        evaluation = {"event": "eval", "round": 0, "tokens": 1, "loss": 1.0, "time": 9.0}
        join = {"event": "join", "peer": worker.name, "time": 9.0}
        tell(worker, join, evaluation, {**commit(worker.name, 2.0), "participants": list(names)})
    readers = [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers]
    monkeypatch.setattr(demo, "_show_sample", lambda *_: True)
    console = Console(file=io.StringIO(), width=200)
    _watch(workers, readers, 1, 40, console)
    assert _summarize(workers, [reader.events for reader in readers], 1, console) == 0
    output = cast(io.StringIO, console.file).getvalue()
    assert output.startswith(f"{joined}\n{round}")
    assert f"rounds             1 of 1 committed {committed}" in output


def test_a_worker_that_is_lost_stands_in_the_table_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [running(tmp_path / "a"), ended(tmp_path / "b", "import os; os.kill(os.getpid(), 9)")]
    step = {"event": "inner_step", "inner_step": 30, "loss": 2.5, "tokens_per_s": 1e3, "time": 100.0}
    for worker in workers:
        tell(worker, {**step, "peer": worker.name})
    readers = [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers]
    for reader in readers:
        reader.read()
    monkeypatch.setattr(demo, "time", SimpleNamespace(time=lambda: 112.0))
    _, living, lost = shown(_table(workers, readers, 8, 40)).splitlines()
    assert living.split() == ["a", "a", "1/8", "30/40", "2.500", "1,000"]
    assert " ".join(lost.split()) == "b b was killed by SIGKILL, last seen 12 s ago"


def test_a_worker_that_starts_shows_what_it_is_about(tmp_path: Path) -> None:
    workers = [running(tmp_path / "a"), running(tmp_path / "b")]
    (workers[0].folder / "console.txt").write_text("run demo: ...\ntokenizing stdlib: 256 of 999 documents\n")
    (workers[1].folder / "console.txt").touch()
    readers = [MetricsReader(worker.folder / "metrics.jsonl") for worker in workers]
    assert _starting(workers, readers) == "a: tokenizing stdlib: 256 of 999 documents"


# --- the command line ----------------------------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an earlier demo; nothing may be started."""
    monkeypatch.setattr(demo, "Processes", None)
    (tmp_path / "demo" / "bootstrap").mkdir(parents=True)
    (tmp_path / "demo" / "model").write_text("hours of work")
    return tmp_path / "demo"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--worker", "2"], "--worker is no option of the demo: did you mean --workers? see ./launch.sh --help"),
        (["--rouns=3"], "--rouns is no option of the demo: did you mean --rounds? see ./launch.sh --help"),
        (["--peers", "/ip4/1.2.3.4"], "--peers is no option of the demo: did you mean --peer? see ./launch.sh --help"),
        (["--resume", "latest"], "--resume is no option of the demo: see ./launch.sh --help"),
        (["swarm"], "swarm is no option of the demo: see ./launch.sh --help"),
        (["--workers", "0"], "--workers: 0 is not a count of at least 1: see ./launch.sh --help"),
        (["--rounds", "many"], "--rounds: many is not a count of at least 1: see ./launch.sh --help"),
        (["--set"], "--set: expected one argument: see ./launch.sh --help"),
        (["--set", "inner.stps=3"], "unknown setting inner.stps in --set: did you mean inner.steps?"),
        (["--set=inner.steps=0"], "inner.steps is 0 in --set: must be "),
        (["--run-id", "a/b"], 'run.id is "a/b" in --run-id: must be '),
        (["--peer", "/nowhere.toml"], "/nowhere.toml does not exist: give an existing file with --peer"),
        (["--set", "data.source=text:/nowhere"], "data.source is text:/nowhere, but there is no such file"),
        (["--set", "model.name=7b"], "model.name is '7b': use tiny, "),
    ],
)
def test_what_no_worker_would_take_is_one_line_before_an_earlier_demo_is_removed(
    earlier: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(["--out", str(earlier), *arguments]) == 64
    shown = capsys.readouterr()
    assert shown.err.startswith(f"opendiloco: {line}")
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert (earlier / "model").read_text() == "hours of work"


def test_a_demo_takes_no_place_of_files_that_are_not_its_own(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, line in ((earlier / "model", "is a file: name a folder"), (earlier.parent, "holds other files")):
        assert main(["--out", str(place)]) == 64
        assert line in capsys.readouterr().err
    assert (earlier / "model").read_text() == "hours of work"


def test_options_of_train_that_go_to_the_workers_are_those_that_leave_the_demo_its_own() -> None:
    command = cast(Any, typer.main.get_command(app)).commands["train"]
    train = {parameter.opts[0] for parameter in command.params}
    passed_on = {"--set": ["a.b=c", "d.e=f"], "--peer": ["p.toml"], "--run-id": ["mine"], "--debug": []}
    assert train - set(passed_on) == {"--run", "--peers", "--out", "--resume", "--address-file"}
    given = [
        part for option, values in passed_on.items() for value in values or [""] for part in (option, value) if part
    ]
    assert _passed_on(_parse(["--workers", "2", *given])) == given


def test_both_helps_say_that_a_demo_replaces_an_earlier_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    launch = subprocess.run(["bash", str(LAUNCH), "--help"], capture_output=True, text=True, check=True)
    for text in (capsys.readouterr().out, launch.stdout):
        assert "replaces what an earlier" in " ".join(text.split())
        for option in ("--workers", "--rounds", "--out", "--set", "--peer", "--run-id", "--debug"):
            assert option in text
