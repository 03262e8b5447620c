"""The round log: entries prove themselves, files are whole or absent."""

from __future__ import annotations

from pathlib import Path

import blake3
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendiloco.codec import get_codec
from opendiloco.ledger import Reading
from opendiloco.outer import next_lineage
from opendiloco.roundlog import LogEntry, LogError, RoundLog, decode_average

CODEC = get_codec("int8")
GENESIS = "ab" * 32


def make(
    round: int = 1, before: str = GENESIS, sizes: tuple[int, ...] = (1024, 5)
) -> tuple[LogEntry, list[memoryview]]:
    torch.manual_seed(round)
    payload = [memoryview(CODEC.encode(torch.randn(size)).numpy().data) for size in sizes]
    digest = blake3.blake3(b"".join(payload)).hexdigest()
    weights = {"a": 1.0, "b": 2.5}
    tokens = {"a": 10, "b": 20}
    readings = {"a": (Reading(shard=3, done=True), Reading(shard=5, rows=2)), "b": ()}
    lineage = next_lineage(
        before, round=round, weights=weights, tokens=tokens, readings=readings, average_digest=digest
    )
    entry = LogEntry(
        round=round,
        before=before,
        lineage=lineage,
        weights=weights,
        tokens=tokens,
        readings=readings,
        digest=digest,
        parts=list(sizes),
    )
    return entry, payload


def test_an_entry_comes_back_bit_for_bit(tmp_path: Path) -> None:
    log = RoundLog(tmp_path, keep=4)
    entry, payload = make()
    log.append(entry, payload)
    stored = log.read(1)
    assert stored is not None
    assert LogEntry.unpack(stored[0], numel=1029) == entry
    decoded, expected = torch.empty(1029), torch.empty(1029)
    decode_average(entry, stored[1], CODEC, decoded)
    decode_average(entry, b"".join(payload), CODEC, expected)
    assert torch.equal(decoded, expected)


def test_only_the_newest_rounds_are_kept_by_number_not_by_text(tmp_path: Path) -> None:
    log = RoundLog(tmp_path, keep=3)
    before = GENESIS
    for round in range(8, 13):
        entry, payload = make(round, before)
        log.append(entry, payload)
        before = entry.lineage
    assert log.rounds() == [10, 11, 12]
    assert log.read(8) is None


def test_rounds_after_the_newest_one_are_another_lineages_and_go(tmp_path: Path) -> None:
    """Of an earlier run in this folder, or given up: they must not push the new ones out."""
    log, before = RoundLog(tmp_path, keep=3), GENESIS
    for round in (8, 9, 10, 1, 2):
        entry, payload = make(round, before)
        log.append(entry, payload)
        before = entry.lineage
    assert log.rounds() == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"round": 2},
        {"before": "cd" * 32},
        {"weights": {"a": 1.0, "b": 2.0}},
        {"tokens": {"a": 11, "b": 20}},
        {"readings": {"a": (), "b": ()}},
        {"digest": "00" * 32},
    ],
)
def test_a_changed_header_does_not_match_its_lineage(change: dict[str, object]) -> None:
    entry, _ = make()
    with pytest.raises(LogError, match="lineage"):
        LogEntry.unpack(entry.model_copy(update=change).pack(), numel=1029)


def test_a_changed_payload_is_refused() -> None:
    entry, payload = make()
    data = bytearray(b"".join(payload))
    data[100] ^= 1
    with pytest.raises(LogError, match="bytes of round 1"):
        decode_average(entry, data, CODEC, torch.empty(1029))
    with pytest.raises(LogError, match="bytes of round 1"):
        decode_average(entry, data[:-1], CODEC, torch.empty(1029))


def test_an_entry_for_another_model_is_refused() -> None:
    entry, _ = make()
    with pytest.raises(LogError, match="1029 values"):
        LogEntry.unpack(entry.pack(), numel=1030)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    with pytest.raises(LogError):
        LogEntry.unpack(data, numel=1)


def test_a_cut_file_and_a_leftover_are_never_read(tmp_path: Path) -> None:
    log = RoundLog(tmp_path, keep=4)
    entry, payload = make()
    log.append(entry, payload)
    path = next(tmp_path.glob("round-*"))
    (tmp_path / ".round-00000002.bin").write_bytes(path.read_bytes())
    path.write_bytes(path.read_bytes()[:6])
    again = RoundLog(tmp_path, keep=4)
    assert again.read(1) is None
    assert again.rounds() == [1]
    assert not list(tmp_path.glob(".round-*"))


def test_a_full_disk_leaves_the_entries_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RoundLog(tmp_path, keep=4)
    first, payload = make()
    log.append(first, payload)
    second, more = make(2, first.lineage)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("opendiloco.roundlog.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        log.append(second, more)
    assert log.rounds() == [1]
    assert not list(tmp_path.glob(".round-*"))


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    log = RoundLog(tmp_path, keep=1)
    for name in ("round-abc.bin", "round-1.bin.bak", "notes.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "round-00000009.bin").mkdir()
    for round in (1, 2):
        log.append(*make(round))
    assert log.rounds() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "round-00000002.bin",
        "round-00000009.bin",
        "round-1.bin.bak",
        "round-abc.bin",
    ]


def test_leftovers_of_a_killed_worker_go_and_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / ".round-00000001.bin").write_bytes(b"half")
    (tmp_path / ".round-00000002.bin").mkdir()
    RoundLog(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == [".round-00000002.bin"]
