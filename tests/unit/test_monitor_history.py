"""The history has what happened once, of one run, and stays small whatever peers tell; its file survives a restart."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.records import CONTRACT, NOW, progress, seen, told, told_round

from opendiloco.claims import Seen, Told, ToldEvaluation, ToldLoss
from opendiloco.config import Contract, RunConfig
from opendiloco.errors import SettingsError
from opendiloco.monitor import archive as archive_module
from opendiloco.monitor import history as history_module
from opendiloco.monitor.archive import Archive
from opendiloco.monitor.history import History, fair_share
from opendiloco.monitor.sights import FORGET_S, Sights
from opendiloco.monitor.snapshot import snapshot


class Start(Protocol):
    def __call__(self, folder: Path | None, contract: Contract = CONTRACT) -> Monitor: ...


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts monitors, which end with the test."""
    started: list[Monitor] = []

    def start(folder: Path | None, contract: Contract = CONTRACT) -> Monitor:
        started.append(Monitor(folder, contract))
        return started[-1]

    yield start
    for monitor in started:
        monitor.archive.close()


class Monitor:
    """One that looks at what a test puts on the DHT, and keeps it in a folder."""

    def __init__(self, folder: Path | None, contract: Contract = CONTRACT) -> None:
        self.archive, self._sights, self._contract = Archive(folder), Sights(), contract

    def look(self, now: float = NOW, /, **workers: Seen) -> None:
        self._sights.look(workers, now, [self._contract])
        self.archive.take(self._sights.workers, snapshot([self._contract], self._sights.workers, now))

    def kill(self) -> None:
        """It ends without a word."""
        assert self.archive._file is not None
        self.archive._file.close()
        assert self.archive._lock is not None
        os.close(self.archive._lock)
        self.archive._file = self.archive._lock = None

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in self.archive.history.after(0)[0]]

    def states(self, peer: str) -> list[tuple[str, float]]:
        """With the seconds from `NOW`."""
        events = [event for event in self.events if event["kind"] == "state" and event["peer"] == peer]
        return [(event["state"], event["time"] - NOW) for event in events]


def at(now: float, tells: Told | None = None, **changes: Any) -> Seen:
    return seen(progress(issued=now - 1, **changes), tells, until=now + 11)


def file_in(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_every_change_is_there_once_and_it_goes_on_after_a_restart(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    monitor = start(folder)
    tells = told(told_round(2), evaluations=[ToldEvaluation(round=2, loss=2.0, tokens=5)])
    for _ in range(2):
        monitor.look(a=seen(tells=tells))
    kinds = [(event["kind"], event["peer"]) for event in monitor.events]
    assert kinds == [("state", "a"), ("round", "a"), ("evaluation", "a")]
    monitor.archive.close()
    with file_in(folder).open("a") as lines:
        lines.write('{"kind": "state", "time": 1, "peer": "x", "state": "<b>"}\n[1\n' + "x" * 10_000 + "\n{")
    again = start(folder)
    tells = tells.after(ToldLoss(round=2, loss=1.5)).after(told_round(3))
    again.look(NOW + 2, a=at(NOW + 2, tells, state="averaging"))
    assert again.events[:4] == monitor.events
    news = again.events[4:]
    assert [event["kind"] for event in news] == ["state", "round", "round"]
    assert [event["told"]["loss"] for event in news[1:]] == [1.5, None]
    again.archive.close()
    assert [json.loads(line) for line in file_in(folder).read_text().splitlines()] == again.events


def test_each_run_has_a_file_of_its_own(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Contract(run=RunConfig(id="other", rounds=9))
    changed = Contract(run=RunConfig(id="test", rounds=8))
    for contract in (CONTRACT, other, changed, CONTRACT):
        monitor = start(tmp_path, contract)
        with caplog.at_level("INFO", logger="opendiloco"):
            monitor.look(a=at(NOW, contract=contract.digest), b=at(NOW, contract="5" * 64))
        monitor.archive.close()
    names = {f"history-{one.run.id}-{one.digest[:12]}.jsonl" for one in (CONTRACT, other, changed)}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert [event["peer"] for event in monitor.events] == ["a"] * 4
    assert "run test" in caplog.text
    assert f"history-test-{CONTRACT.digest[:12]}.jsonl, with 2 events so far" in caplog.text


def test_another_contract_that_most_have_begins_another_history(tmp_path: Path) -> None:
    changed = Contract(run=RunConfig(id="test", rounds=8))
    archive, sights = Archive(tmp_path), Sights()
    lives = []
    for contract, peers in ((CONTRACT, "ab"), (changed, "cdefg")):
        contracts = [CONTRACT, changed]
        sights.look({peer: at(NOW, contract=contract.digest) for peer in peers}, NOW, contracts)
        archive.take(sights.workers, snapshot(contracts, sights.workers, NOW))
        lives.append(archive.history.life)
        assert {json.loads(line)["peer"] for _, line in archive.history.after(0)[0]} == set(peers)
    assert lives[0] != lives[1]
    archive.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_states_end_with_the_monitor_that_saw_them(start: Start, tmp_path: Path) -> None:
    monitor = start(tmp_path)
    monitor.look(a=at(NOW), b=at(NOW), c=at(NOW, state="left"))
    monitor.look(NOW + 50, a=at(NOW + 50), b=at(NOW + 50))
    monitor.archive.close()
    again = start(tmp_path)
    again.look(NOW + 9000, a=at(NOW + 9000))
    assert again.states("a") == [("training", 0), ("unwatched", 50), ("training", 9000)]
    assert again.states("b") == [("training", 0), ("unwatched", 50)]
    assert again.states("c") == [("left", 0)]


def test_states_end_with_the_last_thing_that_a_killed_monitor_saw(start: Start, tmp_path: Path) -> None:
    for later, tells in ((0, None), (30, told(told_round()))):
        monitor = start(tmp_path)
        monitor.look(NOW + later, a=at(NOW + later), b=at(NOW + later, tells))
        monitor.kill()
    again = start(tmp_path)
    again.look(NOW + 9000)
    assert again.states("a") == [("training", 0), ("unwatched", 0), ("training", 30), ("unwatched", 30)]


def test_a_worker_that_is_forgotten_is_unwatched(start: Start) -> None:
    monitor = start(None)
    monitor.look(a=at(NOW), b=at(NOW))
    for hour in (FORGET_S, 2 * FORGET_S + 30, 3 * FORGET_S + 60):
        monitor.look(NOW + hour, b=at(NOW + hour))
    assert [state for state, _ in monitor.states("a")] == ["training", "silent", "unwatched"]
    assert set(monitor.archive.history._known) == {"b"}


def flood(look: int) -> Told:
    """As much as is new in one record at each look."""
    rounds = [told_round(1 + number, ended=NOW + 10 * look + number) for number in range(3)]
    losses = [ToldEvaluation(round=1, loss=look + number / 10, tokens=5) for number in range(8)]
    return told(*rounds, evaluations=losses)


def test_a_peer_that_tells_too_much_loses_its_own_and_file_and_memory_stay_small(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "MAX_EVENTS", 200)
    monkeypatch.setattr(history_module, "KEPT_EVENTS", 180)
    monkeypatch.setattr(archive_module, "APPENDED_BYTES", 50_000)
    monitor, largest = start(tmp_path), 0
    honest = told(*(told_round(number) for number in range(1, 4)))
    for number in range(200):
        now = NOW + 2 * number
        monitor.look(now, a=at(now, honest), b=at(now, flood(number)))
        largest = max(largest, file_in(tmp_path).stat().st_size)
    assert [event["kind"] for event in monitor.events if event["peer"] == "a"] == ["state", *["round"] * 3]
    assert 150 < len(monitor.events) <= 200
    assert largest < 50_000 + 200 * 600
    assert json.loads(file_in(tmp_path).read_text().splitlines()[-1]) == monitor.events[-1]
    monkeypatch.setattr(archive_module, "MAX_READ_BYTES", 10_000)
    monitor.kill()
    again = start(tmp_path)
    again.look(now, a=at(now, honest))
    assert 20 < len(again.events) < 100
    assert file_in(tmp_path).stat().st_size < 10_000 + 2000


def test_more_peers_than_there_is_room_for_leave_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_EVENTS", 50)
    monkeypatch.setattr(history_module, "KEPT_EVENTS", 45)
    monkeypatch.setattr(history_module, "MAX_NEWS", 30)
    history, sights = History(), Sights()
    sights.look({f"{number:03d}": at(NOW) for number in range(100)}, NOW, [CONTRACT])
    for look, count in enumerate((30, 60, 90, 100, 100)):
        history.look(sights.workers, NOW + look)
        events, newest = history.after(0)
        assert newest == count
        assert len(events) <= 50
    assert [number for number, _ in history.after(98)[0]] == [99, 100]
    assert set(history._numbers) == {json.loads(line)["peer"] for _, line in events}


@pytest.mark.parametrize(
    ("counts", "room", "share"), [([], 9, 1), ([3, 4], 9, 4), ([1, 9, 9], 9, 4), ([9], 5, 5), ([1] * 9, 5, 1)]
)
def test_small_ones_keep_all_they_have(counts: list[int], room: int, share: int) -> None:
    assert fair_share(counts, room) == share


def test_rounds_that_the_run_cannot_have_are_not_read_from_a_file_either(start: Start, tmp_path: Path) -> None:
    monitor = start(tmp_path)
    monitor.look(a=seen(tells=told(told_round(3))))
    monitor.archive.close()
    file = file_in(tmp_path)
    file.write_text(file.read_text().replace('"round":3', f'"round":{2**40}'))
    again = start(tmp_path)
    again.look(NOW + 1)
    assert {event["kind"] for event in again.events} == {"state"}


def test_a_disk_that_was_full_costs_nothing_once_there_is_room(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = start(tmp_path)
    monitor.look(a=at(NOW))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(archive_module, "_joined", full)
        monitor.look(NOW + 2, a=at(NOW + 2, state="averaging"))
        monitor.look(NOW + 70, a=at(NOW + 70))
    monitor.look(NOW + 72, a=at(NOW + 72, state="averaging"))
    before = file_in(tmp_path).read_text().splitlines()
    monitor.look(NOW + 140, a=at(NOW + 140))
    assert (len(before), len(file_in(tmp_path).read_text().splitlines()), len(monitor.events)) == (1, 5, 5)
    monitor.archive.close()


def test_a_disk_that_was_full_costs_nothing_where_there_is_room_at_the_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = start(tmp_path)
    monitor.look(a=at(NOW))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(archive_module, "_joined", full)
        monitor.look(NOW + 2, a=at(NOW + 2, state="averaging"))
    monitor.archive.close()
    assert [json.loads(line)["state"] for line in file_in(tmp_path).read_text().splitlines()] == [
        "training",
        "averaging",
        "unwatched",
    ]


@pytest.mark.parametrize("time", ["Infinity", "-Infinity", "NaN", "1e300", "-1", str(NOW + 1e5), "null"])
def test_times_that_cannot_be_are_not_read_from_a_file(start: Start, tmp_path: Path, time: str) -> None:
    first = start(tmp_path)
    first.look(a=at(NOW))
    first.archive.close()
    with file_in(tmp_path).open("a") as file:
        file.write(f'{{"kind":"state","time":{time},"peer":"a","state":"training"}}\n')
    second = start(tmp_path)
    second.look(NOW + 50, a=at(NOW + 50))
    assert [event["time"] for event in second.events] == [NOW, NOW, NOW + 50]
    second.archive.close()


def test_two_monitors_do_not_write_one_history(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path)
    with pytest.raises(SettingsError, match=r"another monitor keeps its history in .*: choose another --out"):
        Archive(tmp_path)
    first.look(a=at(NOW))
    first.kill()
    second = start(tmp_path)
    second.look(NOW + 2, a=at(NOW + 2))
    second.archive.close()
    Archive(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_told_of_with_the_cure(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="choose another --out"):
        Archive(tmp_path / "file")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/full")])
@pytest.mark.parametrize("suffix", [".jsonl", ".part"])
def test_what_is_no_file_is_not_waited_for(
    start: Start, tmp_path: Path, make: Callable[[Path], None], suffix: str
) -> None:
    make(tmp_path / f"history-test-{CONTRACT.digest[:12]}{suffix}")
    watcher = start(tmp_path)
    if suffix == ".jsonl" or make is Path.mkdir:
        with pytest.raises(SettingsError, match="choose another --out"):
            watcher.look(a=at(NOW))
    else:
        watcher.look(a=at(NOW))
        assert Path("/dev/full").exists()
