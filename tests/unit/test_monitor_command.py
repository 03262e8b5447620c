"""`monitor` from its start to its end, before a DHT that is made up."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.records import CONTRACT, progress, seen

from opendiloco.claims import Seen
from opendiloco.config import Contract, SwarmConfig
from opendiloco.errors import SwarmError
from opendiloco.leave import Leave
from opendiloco.monitor import command
from opendiloco.monitor.command import run_monitor

CONFIG = SwarmConfig(peers=("/ip4/127.0.0.1/tcp/1/p2p/x",), startup_timeout_s=60)


class Dht:
    """Stands for the peer that looks; SIGTERM comes at look number `looks`, where that is given."""

    def __init__(self, runs: dict[str, list[Contract]], workers: dict[str, Seen], looks: int | None = None) -> None:
        self._runs, self._workers, self._looks = runs, workers, looks

    def __call__(self, config: SwarmConfig, folder: None, *, leaving: Callable[[], bool]) -> Dht:
        self._leaving = leaving
        return self

    def __enter__(self) -> Dht:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open(self) -> None:
        pass

    check = open

    def runs(self, run_id: str | None, *, with_workers: bool) -> dict[str, list[Contract]]:
        self._count()
        return {named: found for named, found in self._runs.items() if run_id in (None, named)}

    def observe(self, run_id: str) -> dict[str, Seen]:
        self._count()
        return self._workers

    def _count(self) -> None:
        if self._looks is not None:
            self._looks -= 1
            if not self._looks:
                signal.raise_signal(signal.SIGTERM)
        if self._leaving():
            raise Leave


def watch(monkeypatch: pytest.MonkeyPatch, dht: Dht, **options: Any) -> int:
    monkeypatch.setattr(command, "Peer", dht)
    return run_monitor(CONFIG, run_id=None, **{"as_json": False, "web": None, "out": None, **options})


def in_files(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]


def test_one_snapshot_is_kept_where_a_folder_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = Dht({"test": [CONTRACT]}, {"a": seen(progress(), until=1e11)})
    for _ in range(2):
        assert watch(monkeypatch, found, as_json=True, out=tmp_path) == 0
        assert json.loads(capsys.readouterr().out)["workers"] == 1
    assert [(event["peer"], event["state"]) for event in in_files(tmp_path)] == [
        ("a", "training"),
        ("a", "unwatched"),
    ] * 2


@pytest.mark.parametrize(("runs", "looks"), [({}, 1), ({"test": [CONTRACT]}, 2)])
def test_one_snapshot_that_a_signal_prevents_is_no_success(
    runs: dict[str, list[Contract]], looks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch(monkeypatch, Dht(runs, {}, looks), as_json=True) == 130
    assert capsys.readouterr().out == ""


def test_a_terminal_is_watched_until_a_signal_comes_and_that_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "LOOK_S", 0.0)
    found = Dht({"test": [CONTRACT]}, {"a": seen(progress(), until=1e11)}, looks=4)
    assert watch(monkeypatch, found, out=tmp_path) == 0
    assert capsys.readouterr().out.count("round 3 of 9") == 2
    assert [event["state"] for event in in_files(tmp_path)] == ["training", "unwatched"]


def test_a_terminal_shows_as_much_as_it_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(
        command, "Console", lambda: Console(file=out, force_terminal=True, width=100, height=24, color_system=None)
    )
    monkeypatch.setattr(command, "LOOK_S", 0.0)
    workers = {f"{number:010d}": seen(progress(), until=1e11) for number in range(40)}
    assert watch(monkeypatch, Dht({"test": [CONTRACT]}, workers, looks=3)) == 0
    assert "more workers" in out.getvalue()
    assert "0000000039" not in out.getvalue()


@pytest.mark.parametrize("form", [{"as_json": True}, {"web": "0"}, {}], ids=["json", "web", "terminal"])
def test_the_end_of_the_network_is_no_leave(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    class CutOff(Dht):
        def observe(self, run_id: str) -> dict[str, Seen]:
            raise SwarmError("the network process of this peer has ended")

    with pytest.raises(SwarmError, match="has ended"):
        watch(monkeypatch, CutOff({"test": [CONTRACT]}, {}), **form)
