"""Claims about documents, tokenizers and token streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from opendiloco import sequences, text
from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.sequences import permutation
from opendiloco.text import MemoryText, StreamedText, digest, is_held_out, read_source
from opendiloco.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_saved_tokenizer, load_tokenizer
from opendiloco.tokens import TokenStream, training_stream, validation_batches

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


def stream_of(data: DataConfig, *, stream: str = "peer", seed: int = 0, batch_size: int = 4) -> TokenStream:
    return training_stream(data, BYTES, seed=seed, stream=stream, batch_size=batch_size)


def words(batches: Iterator[torch.Tensor], count: int) -> str:
    """Text of the next `count` batches, documents apart by line ends."""
    ids = torch.cat([batch.flatten() for batch in islice(batches, count)])
    return BYTES.decode([10 if i == BYTES.end_id else i for i in ids.tolist()])


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


def test_workers_read_different_text_in_one_order_each(data: DataConfig) -> None:
    first, again, other = (next(stream_of(data, stream=name, batch_size=16)) for name in ("a", "a", "b"))
    assert torch.equal(first, again)
    rows_of = [set(map(tuple, batch.tolist())) for batch in (first, other)]
    assert len(rows_of[0] & rows_of[1]) < 4
    assert not torch.equal(first, next(stream_of(data, stream="a", seed=1, batch_size=16)))


def test_no_worker_trains_on_held_out_text(data: DataConfig) -> None:
    held = BYTES.decode(torch.cat(validation_batches(data, BYTES, batch_size=8)).flatten().tolist())
    marks = {line for line in held.splitlines()[1:-1] if "line" in line} or {
        f"shard {part.split('word')[0].strip()} " for part in held.split("shard ")[1:-1] if "row" in part
    }
    assert marks
    seen = words(stream_of(data), 800)
    assert not [mark for mark in marks if mark in seen]


def test_every_training_document_is_read_and_passes_differ(data: DataConfig) -> None:
    stream = stream_of(data)
    seen = words(stream, 2000)
    source = read_source(data)
    documents = (
        source.documents
        if isinstance(source, MemoryText)
        else [p for shard in range(3) for row in source.rows(shard) for p in row]
    )
    training = [d for d in documents if not is_held_out(digest(d), data.validation_fraction)]
    missing = [d for d in training if d.splitlines()[0].split(" word")[0] not in seen]
    assert not missing
    firsts = [i for i in range(len(seen)) if seen.startswith(seen[:24], i)]
    following = {seen[i : i + 300] for i in firsts}
    assert len(firsts) == 1 or len(following) > 1


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
        "s = training_stream(DataConfig(**data), ByteTokenizer(), seed=0, stream='peer', batch_size=4); "
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


def test_position_of_another_worker_or_text_is_refused(data: DataConfig) -> None:
    stream = stream_of(data)
    before = stream.state_dict()
    with pytest.raises(SettingsError, match="of stream other with"):
        stream.load_state_dict(stream_of(data, stream="other").state_dict())
    assert stream.state_dict() == before


def test_position_in_changed_text_is_refused(folder: Path) -> None:
    data = config(f"text:{folder}")
    state = stream_of(data).state_dict()
    (folder / "more.txt").write_text("something new\n")
    with pytest.raises(SettingsError, match="restore the text"):
        stream_of(data).load_state_dict(state)


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
    first = BYTES.decode(held[0][0].tolist())
    assert first not in words(stream_of(data), 100)


def test_too_little_text_says_how_little(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("word " * 160)
    data = config(f"text:{file}", seq_len=4096)
    message = r"^data.seq_len is 4096 but data.source text:.* has only 80\d tokens in \d documents, too few"
    for read in (lambda: stream_of(data), lambda: validation_batches(data, BYTES, batch_size=1)):
        with pytest.raises(SettingsError, match=message):
            read()


def test_source_with_unlucky_fraction_is_refused_before_training(rows: Path) -> None:
    with pytest.raises(SettingsError, match=r"validation_fraction is 1e-12 and holds out 0 of .*: raise it"):
        stream_of(config(f"jsonl:{rows}", validation_fraction=1e-12))
