"""What is said while text is read at the start, which takes long with a slow tokenizer, disk or hub."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import datasets
import pytest

from opendiloco import prefetch, progress, text
from opendiloco.config import DataConfig
from opendiloco.progress import Progress
from opendiloco.tokenizer import ByteTokenizer, Tokens
from opendiloco.tokens import training_stream, validation_batches

PATIENCE_S = 20.0


@pytest.fixture
def slow(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything takes long, and what is said is heard."""
    caplog.set_level(logging.INFO, "opendiloco")
    monkeypatch.setattr(progress, "PERIOD_S", -1.0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))


def rows(folder: Path) -> DataConfig:
    """A file of 300 rows of 100 bytes."""
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number:0100d}"}) + "\n" for number in range(300)))
    return DataConfig(source=f"jsonl:{file}", seq_len=32, validation_fraction=0.1, validation_sequences=8)


def test_nothing_is_said_of_what_is_quick(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "opendiloco")
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(999)))
    training_stream(DataConfig(source=f"text:{tmp_path}/a.txt", seq_len=32), ByteTokenizer(), seed=0, batch_size=1)
    assert not caplog.messages


@pytest.mark.usefixtures("slow")
def test_tokenizing_says_what_is_tokenized_and_how_far_it_has_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = rows(tmp_path)
    training_stream(data, ByteTokenizer(), seed=0, batch_size=1)
    said = [line for line in caplog.messages if line.startswith(f"tokenizing {data.source}: ")]
    assert said[-2].startswith(f"tokenizing {data.source}: 256 of ")
    documents = int(said[-1].split(" of ")[1].split()[0])
    assert said[-1].endswith(
        f": {documents} of {documents} documents, {documents * 1e-4:.1f} of {documents * 1e-4:.1f} MB, "
        f"{documents * 101:,} tokens"
    )


@pytest.mark.usefixtures("slow")
def test_reading_says_how_many_files_and_megabytes_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"line {name}\n" * 10_000)
    training_stream(DataConfig(source=f"text:{tmp_path}/*.txt", seq_len=32), ByteTokenizer(), seed=0, batch_size=1)
    assert caplog.messages[0] == f"reading text:{tmp_path}/*.txt: 1 of 2 files, 0.1 of 0.1 MB"


@pytest.mark.usefixtures("slow")
def test_streamed_text_says_that_its_beginning_and_its_held_out_part_are_being_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "MEMORY_PIECES", 200)
    data = rows(tmp_path)
    validation_batches(data, ByteTokenizer(), batch_size=4)
    assert caplog.messages[0] == f"reading the beginning of {data.source}: 1 documents, 0.0 MB"
    assert any(
        line.startswith(f"looking for held-out text in {data.source}: ") and line.endswith(" of 256 held-out tokens")
        for line in caplog.messages
    )


@pytest.mark.usefixtures("slow")
def test_a_worker_that_waits_for_text_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MEMORY_PIECES", 200)
    monkeypatch.setattr(prefetch, "PERIOD_S", -1.0)
    monkeypatch.setattr(prefetch, "POLL_S", 0.001)
    has_said = threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode_documents(self, documents: Sequence[str]) -> Tokens:
            assert has_said.wait(PATIENCE_S)
            return super().encode_documents(documents)

    data = rows(tmp_path)
    heard: list[str] = []

    def hear(line: str, *arguments: object) -> None:
        heard.append(line % arguments)
        has_said.set()

    monkeypatch.setattr(prefetch.logger, "info", hear)
    with closing(training_stream(data, SlowTokenizer(), seed=0, batch_size=1, prefetch=True)) as stream:
        next(stream)
    assert heard[0] == f"waits for text of {data.source}, which is read and tokenized"


def test_a_total_that_nobody_knows_is_left_out() -> None:
    done = Progress("reading x", {"rows": 2_000, "MB": None})
    done.advance({"rows": 1_000, "MB": 1.25})
    done.advance({"rows": 1, "MB": 0.0})
    assert done.line == "reading x: 1,001 of 2,000 rows, 1.2 MB"
