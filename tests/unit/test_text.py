"""Claims about documents and the sources they come from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from opendiloco import text
from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.text import MemoryText, cut, digest, is_held_out, read_source


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


def config(source: str, *, seq_len: int = 32, validation_fraction: float = 0.1, text_field: str = "text") -> DataConfig:
    return DataConfig(source=source, seq_len=seq_len, validation_fraction=validation_fraction, text_field=text_field)


# --- documents -----------------------------------------------------------------------------------------


def test_pieces_end_at_line_ends_and_join_to_the_text() -> None:
    whole = "".join(f"line {i}\n" for i in range(100)) + "x" * 150 + "\nend"
    pieces = cut(whole, 64)
    assert "".join(pieces) == whole
    assert max(map(len, pieces)) <= 64
    assert pieces[0].endswith("\n")
    assert "x" * 64 in pieces


def test_white_space_alone_is_no_document() -> None:
    assert cut("\n \n", 10) == []
    assert cut("", 10) == []


def test_documents_do_not_depend_on_file_names(folder: Path, tmp_path: Path) -> None:
    before = read_source(config(f"text:{folder}"))
    for file in list(folder.iterdir()):
        file.rename(folder / f"{digest(file.name):x}.md")
    assert read_source(config(f"text:{folder}")) == before


def test_standard_library_is_megabytes_without_its_tests() -> None:
    source = read_source(DataConfig())
    assert isinstance(source, MemoryText)
    assert sum(map(len, source.documents)) > 5_000_000
    assert any("def namedtuple" in document for document in source.documents)
    assert not any("class TestNamedTuple" in document for document in source.documents)


def test_binary_and_hidden_files_are_no_text(folder: Path) -> None:
    (folder / "image.png").write_bytes(b"\x89PNG\0secret")
    (folder / ".hidden").write_text("secret")
    (folder / "latin.txt").write_bytes("caf\xe9 latin".encode("latin-1"))
    documents = read_source(config(f"text:{folder}")).documents  # type: ignore[union-attr]
    assert not any("secret" in document for document in documents)
    assert "caf\ufffd latin" in documents


def test_glob_and_file_and_folder_read_the_same_files(folder: Path, tmp_path: Path) -> None:
    assert read_source(config(f"text:{folder}/*.txt")) == read_source(config(f"text:{folder}"))
    joined = tmp_path / "one.txt"
    joined.write_text("".join(file.read_text() for file in sorted(folder.iterdir())))
    source = read_source(config(f"text:{joined}"))
    assert isinstance(source, MemoryText)
    assert len(source.documents) >= text.MIN_PIECES


def test_held_out_share_follows_the_fraction() -> None:
    held = sum(is_held_out(digest(f"document {i}"), 0.1) for i in range(5000))
    assert 400 < held < 600


# --- sources -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_small_data_sets_are_held_in_memory_with_their_text(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "set"
    place.mkdir()
    texts = [f"document {i} " + "words " * 100 for i in range(30)]
    if kind == "jsonl":
        (place / "a.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in [*texts, None, ""]))
        (place / "empty.jsonl").touch()
    else:
        pa.parquet.write_table(pa.table({"body": texts}), place / "a.parquet")
    source = read_source(config(f"{kind}:{place}", text_field="body"))
    assert isinstance(source, MemoryText)
    assert sorted(source.documents) == sorted(texts)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("wikipedia", r"^data.source is 'wikipedia': use stdlib, text:PATH"),
        ("csv:{tmp}", "use stdlib, text:PATH"),
        ("text:", "use stdlib, text:PATH"),
        ("text:{tmp}/none", "there is no such file: correct the path"),
        ("text:{tmp}/*.none", "there is no such file"),
        ("jsonl:{tmp}/none.jsonl", "there is no such file"),
        ("parquet:{tmp}", "that folder has no .parquet files"),
        ("text:{tmp}/empty.txt", "has no text"),
        ("jsonl:{tmp}/empty.txt", "has no text"),
        ("jsonl:{tmp}/broken.jsonl", "broken.jsonl cannot be read: "),
        ("parquet:{tmp}/broken.jsonl", "broken.jsonl cannot be read: "),
        ("jsonl:{tmp}/other.jsonl", r"^data.text_field is 'text', but .* has the fields body, id: set it to"),
        ("jsonl:{tmp}/number.jsonl", "which holds int and not text"),
        ("jsonl:{tmp}/mixed.jsonl", r"which holds int and not text in .*mixed.jsonl, row 1\): set it to"),
        (
            "jsonl:{tmp}/short.jsonl.gz",
            r"cannot be read: .*short.jsonl.gz, after 0 rows: |short.jsonl.gz cannot be read: ",
        ),
        ("hf:{tmp}/none", "neither a folder here nor could it be reached"),
    ],
)
def test_bad_sources_are_one_line_with_a_cure(tmp_path: Path, source: str, match: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{broken\n')
    (tmp_path / "other.jsonl").write_text('{"id": 1, "body": "a"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "mixed.jsonl").write_text('{"text": 1, "id": 2}\n')
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:20])
    with pytest.raises(SettingsError, match=match) as caught:
        read_source(config(source.format(tmp=tmp_path)))
    assert "\n" not in str(caught.value)


def test_more_text_than_memory_holds_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MEMORY_BYTES", 1000)
    with pytest.raises(SettingsError, match="store it as jsonl or parquet"):
        read_source(config(f"text:{folder}"))
