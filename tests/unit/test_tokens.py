"""Claims about documents, tokenizers and token streams."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import re
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from opendiloco import sequences, text
from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.leases import read_alone
from opendiloco.ledger import Reading
from opendiloco.sequences import permutation
from opendiloco.text import MemoryText, StreamedText, digest, is_held_out, read_source
from opendiloco.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_saved_tokenizer, load_tokenizer
from opendiloco.tokens import Lease, TokenStream, training_stream, validation_batches

BYTES = ByteTokenizer()


@pytest.fixture(autouse=True)
def _caches_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """100 text files of about 500 characters each."""
    place = tmp_path / "texts"
    place.mkdir()
    for number in range(100):
        (place / f"{number:03}.txt").write_text("".join(f"file {number} line {i}\n" for i in range(30)))
    return place


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """3 JSON-lines files of 100 rows each, which are streamed because the limits are small."""
    monkeypatch.setattr(text, "MEMORY_PIECES", 200)
    monkeypatch.setattr(sequences, "WINDOW_DOCUMENTS", 8)
    place = tmp_path / "rows"
    place.mkdir()
    for shard in range(3):
        lines = [json.dumps({"text": f"shard {shard} row {i} " + "word " * (i % 7)}) for i in range(100)]
        (place / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return place


def config(source: str, *, seq_len: int = 32, validation_fraction: float = 0.1, text_field: str = "text") -> DataConfig:
    return DataConfig(source=source, seq_len=seq_len, validation_fraction=validation_fraction, text_field=text_field)


def stream_of(data: DataConfig, *, seed: int = 0, batch_size: int = 4, lease: Lease = read_alone) -> TokenStream:
    return training_stream(data, BYTES, seed=seed, batch_size=batch_size, lease=lease)


def read(stream: TokenStream, batches: int) -> str:
    """Text of the next batches, a bar after each sequence and a line end after each document."""
    rows = (row for batch in islice(stream, batches) for row in batch.tolist())
    return BYTES.decode([10 if i == BYTES.end_id else i for row in rows for i in [*row, ord("|")]])


def marks(whole: str) -> set[str]:
    """What is named in the text of the fixtures above: file 1 line 2, or shard 0 row 3."""
    return set(re.findall(r"(?:file \d+ line|shard \d+ row) \d+(?=\s)", whole))


# --- tokenizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["", "plain", "h\xe9llo \u65e5\u672c \U0001f600\n\t\0", "<|end|>"])
def test_bytes_survive_a_round_trip_and_never_give_the_end(sample: str) -> None:
    ids = BYTES.encode(sample)
    assert BYTES.decode([*ids, BYTES.end_id]) == sample
    assert BYTES.end_id not in ids


def test_text_that_is_no_unicode_is_encoded_all_the_same() -> None:
    assert BYTES.encode("a\ud800b") == list(b"a?b")
    assert digest("a\ud800b") != digest("ab")
    assert BYTES.decode([0xC3, 65]) == "\ufffdA"


def test_documents_are_separated_by_the_end_id() -> None:
    assert BYTES.encode_documents(["ab", "", "c"]).tolist() == [97, 98, 256, 256, 99, 256]
    assert len(BYTES.encode_documents([])) == 0


def test_saved_byte_tokenizer_is_a_hugging_face_tokenizer_with_the_same_ids(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    other = load_tokenizer(str(tmp_path))
    assert isinstance(other, HuggingFaceTokenizer)
    assert (other.vocab_size, other.end_id) == (257, 256)
    sample = "h\xe9llo  \u65e5 <|end|>\n"
    assert other.encode(sample) == BYTES.encode(sample)
    assert other.decode([*BYTES.encode(sample), 256]) == sample
    documents = ["one", "two \ud800", ""]
    np.testing.assert_array_equal(other.encode_documents(documents), BYTES.encode_documents(documents))
    assert isinstance(load_saved_tokenizer(tmp_path), ByteTokenizer)


def test_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    bare = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(SettingsError, match=r"^data.tokenizer is .*bare, which has no end-of-text token"):
        load_tokenizer(str(tmp_path / "bare"))


@pytest.mark.parametrize(("name", "match"), [("none", "no such folder"), ("empty", "holds no tokenizer")])
def test_missing_tokenizer_is_one_line(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=match) as caught:
        load_tokenizer(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_the_hub_is_named_before_it_is_asked_and_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heard = list[list[str]]()

    def ask(name: str) -> None:
        heard.append(list(caplog.messages))
        raise OSError("no internet")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", ask)
    for _ in range(2):
        with pytest.raises(SettingsError, match="was not found on the hub"):
            load_tokenizer("somebody/tokenizer")
    assert heard == [["somebody/tokenizer is no folder here: asking the Hugging Face hub for it"]] * 2


# --- streams -------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "streamed"])
def data(request: pytest.FixtureRequest) -> DataConfig:
    """A source in memory and one that is streamed."""
    if request.param == "memory":
        return config(f"text:{request.getfixturevalue('folder')}")
    data = config(f"jsonl:{request.getfixturevalue('rows')}")
    assert isinstance(read_source(data), StreamedText)
    return data


def test_batches_are_int64_of_the_asked_shape_and_counted(data: DataConfig) -> None:
    stream = stream_of(data)
    batch = next(stream)
    assert (batch.shape, batch.dtype) == ((4, 32), torch.int64)
    next(stream)
    assert stream.tokens_seen == 2 * 4 * 32


def test_the_order_is_that_of_the_seed(data: DataConfig) -> None:
    first, again = (stream_of(data) for _ in range(2))
    assert all(torch.equal(next(first), next(again)) for _ in range(5))
    seen, seeded = (marks(read(stream_of(data, seed=seed), 8)) for seed in (0, 1))
    assert min(map(len, (seen, seeded))) > 10
    assert len(seen & seeded) < len(seen) / 3


def shard_of(data: DataConfig, number: int) -> list[list[int]]:
    """All sequences of one shard."""
    rows: list[list[int]] = []

    def only_this_one(at: Reading | None, source: int, shards: int) -> Reading:
        if at is not None:
            raise EOFError
        return Reading(shard=number)

    with contextlib.suppress(EOFError):
        for batch in stream_of(data, batch_size=1, lease=only_this_one):
            rows += batch.tolist()
    return rows


@pytest.mark.parametrize(("shards", "of_three_files"), [(1, 1), (2, 2), (5, 3), (64, 24)])
def test_the_shards_of_a_pass_are_disjoint_and_together_the_whole_text(
    data: DataConfig, shards: int, of_three_files: int
) -> None:
    data = data.model_copy(update={"shards": shards})
    count = stream_of(data).shards
    assert count == (shards if data.source.startswith("text") else of_three_files)
    total = len(BYTES.encode_documents(training_documents(data)))
    for number in (0, 3):  # of the pass
        parts = [shard_of(data, number * count + shard) for shard in range(count)]
        tokens = sum(map(len, parts)) * data.seq_len
        assert total - (count + 2) * data.seq_len <= tokens <= total
        read = [marks("|".join(BYTES.decode(row) for row in rows)) for rows in parts]
        assert sum(map(len, read)) == len(set.union(*read)) > 100


def training_documents(data: DataConfig) -> list[str]:
    source = read_source(data)
    shards = range(source.shard_count) if isinstance(source, StreamedText) else []
    documents = (
        source.documents
        if isinstance(source, MemoryText)
        else [piece for shard in shards for row in source.rows(shard) for piece in row]
    )
    return [d for d in documents if not is_held_out(digest(d), data.validation_fraction)]


@pytest.mark.parametrize("batches", [1, 7, 20])
def test_whoever_takes_a_shard_over_reads_on_where_its_reader_was(data: DataConfig, batches: int) -> None:
    data = data.model_copy(update={"shards": 3})
    first = stream_of(data)
    for _ in range(batches):
        next(first)
    at = first.readings[-1]
    assert not at.done
    taken_over = next(stream_of(data, lease=lambda *_: at))
    if isinstance(read_source(data), MemoryText):
        assert torch.equal(taken_over, next(first))
    else:  # less than a sequence was left over from what came before: it goes with its reader
        going_on = BYTES.decode(torch.cat([next(first), next(first)]).flatten().tolist())
        found = BYTES.decode(taken_over.flatten().tolist())
        assert found[:64] in going_on


def test_every_training_document_is_read_and_passes_differ(data: DataConfig) -> None:
    expected = marks(" \n".join(training_documents(data)))
    seen = read(stream_of(data), 6000 if data.source.startswith("text") else 1500)
    assert len(expected) > 200
    assert marks(seen) <= expected
    assert len(expected - marks(seen)) <= 5  # those at the very ends of the text may be cut in each pass
    passes = [seen.find(sorted(expected)[0], start) for start in (0, len(seen) // 2)]
    assert len({seen[place : place + 200] for place in passes}) == 2


def test_streamed_documents_stay_whole_across_sequences_and_windows(rows: Path) -> None:
    data = config(f"jsonl:{rows}", seq_len=100)
    source = read_source(data)
    assert isinstance(source, StreamedText)
    whole = {piece for shard in range(3) for row in source.rows(shard) for piece in row}
    ids = torch.cat([batch.flatten() for batch in islice(stream_of(data), 50)]).tolist()
    ends = [place for place, i in enumerate(ids) if i == BYTES.end_id]
    read_documents = [BYTES.decode(ids[start + 1 : end]) for start, end in pairwise([-1, *ends])]
    assert len(read_documents) > 300
    assert set(read_documents) <= whole


@pytest.mark.parametrize("batches", [0, 1, 37, 300])
def test_resumed_stream_gives_the_same_next_batches(data: DataConfig, batches: int) -> None:
    stream = stream_of(data)
    for _ in range(batches):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = stream_of(data)
    next(resumed)
    resumed.load_state_dict(state)
    for _ in range(60):
        assert torch.equal(next(stream), next(resumed))
    assert resumed.state_dict() == stream.state_dict()


def test_new_process_resumes_with_the_same_batch(folder: Path) -> None:
    stream = stream_of(config(f"text:{folder}"))
    next(stream)
    state = stream.state_dict()
    program = (
        "import json, sys; from opendiloco.config import DataConfig; from opendiloco.tokens import *; "
        "from opendiloco.tokenizer import ByteTokenizer; data, state = json.loads(sys.argv[1]); "
        "s = training_stream(DataConfig(**data), ByteTokenizer(), seed=0, batch_size=4); "
        "s.load_state_dict(state); print(json.dumps(next(s).tolist()))"
    )
    arguments = json.dumps([config(f"text:{folder}").model_dump(), state])
    output = subprocess.run(
        [sys.executable, "-c", program, arguments],
        env={**os.environ, "PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(output.stdout) == next(stream).tolist()


def test_order_is_a_permutation_that_never_changes() -> None:
    assert sorted(permutation(1000, "key").tolist()) == list(range(1000))
    assert permutation(8, "golden", 0).tolist() == GOLDEN


GOLDEN = [4, 7, 1, 0, 5, 2, 6, 3]


def test_position_in_another_order_is_refused(data: DataConfig) -> None:
    stream = stream_of(data)
    before = stream.state_dict()
    with pytest.raises(SettingsError, match=r"one of run.seed 1, here it is 0"):
        stream.load_state_dict(stream_of(data, seed=1).state_dict())
    assert stream.state_dict() == before


def test_position_in_changed_text_is_refused(folder: Path) -> None:
    data = config(f"text:{folder}")
    state = stream_of(data).state_dict()
    (folder / "more.txt").write_text("something new\n")
    with pytest.raises(SettingsError, match="restore the text"):
        stream_of(data).load_state_dict(state)


# --- text that goes away or breaks under a worker ------------------------------------------------------


def test_a_file_that_breaks_is_left_out_from_there_on_with_a_line_and_the_rest_is_read(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = config(f"jsonl:{rows}")
    stream = stream_of(data)
    next(stream)
    good = (rows / "1.jsonl").read_bytes()
    (rows / "1.jsonl").write_bytes(b"{broken\n" + good)
    (rows / "2.jsonl").unlink()
    seen = marks(read(stream, 400))
    assert len({mark for mark in seen if mark.startswith("shard 0")}) > 80
    assert len({mark for mark in seen if not mark.startswith("shard 0")}) < 20  # what had been read before
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(
        re.search(r"cannot be read: .*/1\.jsonl, after 0 rows: .*: the rest of it is left out", line) for line in lines
    )
    assert any(re.search(r"cannot be read: .*/2\.jsonl, after 0 rows: ", line) for line in lines)
    assert len(lines) < 12


@pytest.mark.parametrize("kind", ["gzip", "parquet"])
def test_a_file_that_breaks_off_gives_its_rows_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A copy that was cut short; small blocks stand for large files."""
    monkeypatch.setattr(text, "MEMORY_PIECES", 20)
    lines = [json.dumps({"text": f"shard 0 row {i} {i * 7919 % 1000003}"}) + "\n" for i in range(40)]
    if kind == "gzip":
        file = tmp_path / "a.jsonl.gz"
        whole = gzip.compress("".join(lines).encode())
    else:
        file = tmp_path / "a.parquet"
        table = pyarrow.Table.from_pylist([json.loads(line) for line in lines])
        pyarrow.parquet.write_table(table, file, row_group_size=10)
        whole = file.read_bytes()
    file.write_bytes(whole)
    stream = stream_of(config(f"{'jsonl' if kind == 'gzip' else kind}:{tmp_path}/{file.name}", seq_len=16))
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        SettingsError, match=r"gave no full sequence in \d+ shards, more than a pass: restore its files"
    ):
        list(islice(stream, 1000))
    assert any(
        "the rest of it is left out (files left out so far: 1)" in record.getMessage() for record in caplog.records
    )


def test_a_source_whose_files_are_all_gone_ends_the_worker_with_one_line(rows: Path) -> None:
    stream = stream_of(config(f"jsonl:{rows}"))
    next(stream)
    for file in rows.iterdir():
        file.unlink()
    with pytest.raises(SettingsError, match=r"^data\.source jsonl:.*rows gave no full sequence in") as caught:
        list(islice(stream, 1000))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 64


# --- validation ----------------------------------------------------------------------------------------


def test_validation_is_bounded_and_equal_everywhere(data: DataConfig) -> None:
    small = data.model_copy(update={"validation_sequences": 5})
    batches = validation_batches(small, BYTES, batch_size=2)
    assert [tuple(batch.shape) for batch in batches] == [(2, 32), (2, 32), (1, 32)]
    assert batches[0].dtype == torch.int64
    assert all(map(torch.equal, batches, validation_batches(small, BYTES, batch_size=2)))


def test_one_small_file_gives_both_parts(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("".join(f"line number {i}\n" for i in range(100)))
    data = config(f"text:{file}", validation_fraction=0.001)
    held = validation_batches(data, BYTES, batch_size=8)
    seen = read(stream_of(data), 100)
    lines = [line for line in BYTES.decode(held[0][0].tolist()).splitlines()[1:-1] if line]
    assert lines
    assert not [line for line in lines if f"{line}\n" in seen]


def test_too_little_text_says_how_little(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("word " * 160)
    data = config(f"text:{file}", seq_len=4096)
    message = r"^data.seq_len is 4096 but data.source text:.* has only 80\d tokens in \d documents, too few"
    for use in (lambda: stream_of(data), lambda: validation_batches(data, BYTES, batch_size=1)):
        with pytest.raises(SettingsError, match=message):
            use()


def test_source_with_unlucky_fraction_is_refused_before_training(rows: Path) -> None:
    with pytest.raises(SettingsError, match=r"validation_fraction is 1e-12 and holds out 0 of .*: raise it"):
        stream_of(config(f"jsonl:{rows}", validation_fraction=1e-12))
