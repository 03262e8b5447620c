"""Documents: the text behind data.source, cut into pieces, and which pieces are held out for validation.

A file, or a row of a data set, is cut at line ends into pieces of bounded size. From then on a piece is
the document: one large file works as well as a million small ones.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from opendiloco.config import DataConfig
from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.files import SUFFIXES, named, source_files, stdlib_files
from opendiloco.hub import explanation, patient
from opendiloco.progress import Progress

PIECE_CHARS = 16_384
"""Characters of the longest document; longer files and rows are cut."""
MIN_PIECES = 20
"""A source that gives fewer documents than this is cut finer, so that both parts get some."""
MIN_PIECE_CHARS = 256
"""Characters below which nothing is cut finer."""
MEMORY_PIECES = 2_048
"""A jsonl, parquet or hub data set with at most this many documents is kept in memory, not streamed."""
MEMORY_BYTES = 2 * 1024**3
"""Size of the largest text: source; larger ones belong into jsonl or parquet, which are streamed."""

_PARQUET_ROWS = 1_024  # read at once; left to the library, a file without rows is an error
MAX_TOKEN_CHARS = 32  # on average, of any tokenizer
_SCHEMES = "stdlib, text:PATH, jsonl:PATH, parquet:PATH or hf:NAME[/CONFIG]"


class UnreadableText(SettingsError):
    """A file that is gone or broken. At the start it ends the worker; later on what is left of the file is left out."""


@dataclass(frozen=True)
class MemoryText:
    """A source that is read as a whole. `documents` are distinct and in the order of their digests,
    hence independent of file names and of the file system."""

    documents: tuple[str, ...]


@dataclass(frozen=True)
class StreamedText:
    """A source too large to hold: shards (its files) of rows, each of which can be read from any row on."""

    data: DataConfig
    """Of this source alone."""
    dataset: Any
    """A datasets.IterableDataset."""
    files: tuple[str, ...] = ()
    """Names of the shards' files, where they are known."""
    leaving: Callable[[], bool] = lambda: False
    """Ends a wait for the hub."""
    stopped: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set: nobody reads any more, which ends a wait for the hub too."""

    @property
    def shard_count(self) -> int:
        return int(self.dataset.num_shards)

    def rows(self, shard: int, *, skip: int = 0) -> Iterator[list[str]]:
        """Documents of each row of one shard, without its first `skip` rows. A row may give none.

        Raises:
            UnreadableText: the file is gone, or broken from this row on.
            SettingsError: no text in data.text_field; the hub refuses the file.
        """
        part = self.dataset.shard(num_shards=self.shard_count, index=shard)
        part = part.skip(skip) if skip else part
        file = self.files[shard] if shard < len(self.files) else f"file {shard + 1} of {self.shard_count}"
        with patient(lambda: self.stopped.is_set() or self.leaving()) if is_on_hub(self.data) else nullcontext():
            for text in _row_texts(part, self.data, file=file, skipped=skip):
                yield cut(text, PIECE_CHARS)


def read_source(data: DataConfig, *, leaving: Callable[[], bool] = lambda: False) -> MemoryText | StreamedText:
    """Open data.source.

    Args:
        leaving: ends a wait for a hub that does not answer.
    Returns: all documents of a `stdlib`, `text:` or small data set, else a source to stream from.
    Raises:
        SettingsError: unknown scheme, missing or empty source, missing text field, unreadable rows.
        HubStopped: on leaving.
    """
    source = _open(data, leaving)
    if not isinstance(source, StreamedText):
        return _in_memory(source, data)
    head = list(islice(_pieces(source), MEMORY_PIECES + 1))
    if len(head) <= MEMORY_PIECES:
        return _in_memory(head, data)
    held = sum(is_held_out(digest(piece), data.validation_fraction) for piece in head)
    if not 0 < held < len(head):
        cure = "raise" if held == 0 else "lower"
        raise SettingsError(
            f"data.validation_fraction is {data.validation_fraction} and holds out {held} of the first "
            f"{len(head)} documents of data.source {data.source}: {cure} it"
        )
    return source


def check_source(data: DataConfig) -> None:
    """Find out at once, without reading anything, what `read_source` would say about a missing or unknown source.

    Raises:
        SettingsError: unknown scheme, no such file.
    """
    scheme, colon, place = str(data.source).partition(":")
    if data.source != "stdlib" and (not colon or not place or scheme not in ("text", "jsonl", "parquet", "hf")):
        raise SettingsError(f"data.source is {data.source!r}: use {_SCHEMES}")
    if scheme in ("text", "jsonl", "parquet"):
        source_files(data, place, suffixes=SUFFIXES.get(scheme, ()))


def check_text(data: DataConfig) -> bool:
    """Read a source's beginning; whether it may be too short: it ends before two sequences of the longest tokens.

    Not a source on the hub, which may take its time to answer.

    Raises:
        SettingsError: as `read_source`, where the beginning shows it.
    """
    if is_on_hub(data) and not Path(str(data.source).removeprefix("hf:")).expanduser().is_dir():
        return False
    source, chars = _open(data, lambda: False), 0
    try:
        for piece in _pieces(source) if isinstance(source, StreamedText) else source:
            chars += len(piece)
            if chars > 2 * MAX_TOKEN_CHARS * data.seq_len:
                return False
    except UnreadableText as error:
        raise SettingsError(f"{error}: correct that file, or leave it out") from None
    if not chars:
        raise _no_text(data)
    return True


def is_on_hub(data: DataConfig) -> bool:
    """Whether data.source is a name on the hub, or a folder in that form."""
    return str(data.source).startswith("hf:")


def cut(text: str, size: int) -> list[str]:
    """Split text into pieces of at most `size` characters, at line ends where there are any.

    The pieces joined give the text; pieces of white space alone are left out.
    """
    pieces = []
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    return [piece for piece in pieces if not piece.isspace()]


def digest(text: str) -> int:
    """Hash of a document in [0, 2**64): the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def is_held_out(document_digest: int, fraction: float) -> bool:
    """Whether a document belongs to validation: decided by its text alone, so that peers agree unasked."""
    return document_digest < fraction * 2.0**64


def _open(data: DataConfig, leaving: Callable[[], bool]) -> Iterator[str] | StreamedText:
    """The documents of text files as they are read, or a data set."""
    check_source(data)
    scheme, _, place = str(data.source).partition(":")
    if data.source == "stdlib":
        return _read_files(stdlib_files(), data)
    if scheme == "text":
        return _read_files(source_files(data, place, suffixes=()), data)
    return _open_stream(data, scheme, place, leaving)


def _no_text(data: DataConfig) -> SettingsError:
    return SettingsError(
        f"data.source {data.source} has no text: name one that has some (files with NUL bytes in them have none)"
    )


def _in_memory(pieces: Iterable[str], data: DataConfig) -> MemoryText:
    distinct = {digest(piece): piece for piece in pieces}
    if not distinct:
        raise _no_text(data)
    if len(distinct) < MIN_PIECES:
        total_chars = sum(map(len, distinct.values()))
        size = max(MIN_PIECE_CHARS, total_chars // MIN_PIECES)
        distinct = {digest(piece): piece for whole in distinct.values() for piece in cut(whole, size)}
    return MemoryText(documents=tuple(distinct[key] for key in sorted(distinct)))


def _pieces(source: StreamedText) -> Iterator[str]:
    progress = Progress(f"reading the beginning of {source.data.source}", {"documents": None, "MB": None})
    for shard in range(source.shard_count):
        for row in source.rows(shard):
            progress.advance({"documents": len(row), "MB": sum(map(len, row)) / 1e6})
            yield from row


def _read_files(files: list[Path], data: DataConfig) -> Iterator[str]:
    with named(data):
        total_bytes = sum(file.stat().st_size for file in files)
    if total_bytes > MEMORY_BYTES:
        raise SettingsError(
            f"data.source {data.source} has {total_bytes / 1e9:.1f} GB, more than the "
            f"{MEMORY_BYTES / 1e9:.1f} GB that are kept in memory: store it as jsonl or parquet, which are "
            "streamed"
        )
    progress = Progress(f"reading {data.source}", {"files": len(files), "MB": total_bytes / 1e6})
    for file in files:
        with named(data):
            content = file.read_bytes()
        progress.advance({"files": 1, "MB": len(content) / 1e6})
        if b"\0" not in content[:8192]:  # a NUL byte: not a text file
            yield from cut(content.decode("utf-8", "replace").replace("\r\n", "\n"), PIECE_CHARS)


def _open_stream(data: DataConfig, scheme: str, place: str, leaving: Callable[[], bool]) -> StreamedText:
    """A streaming data set of the `datasets` library, which reads compressed and remote files alike."""
    from datasets import load_dataset_builder  # slow to import, and needed by these schemes only

    try:
        if scheme == "hf":
            name, config = _hub_name(place)
            with patient(leaving):
                builder = load_dataset_builder(name, config)
                dataset = builder.as_streaming_dataset(split="train")
        else:
            full = [str(file) for file in source_files(data, place, suffixes=SUFFIXES[scheme]) if file.stat().st_size]
            if not full:
                raise _no_text(data)
            if scheme == "jsonl":
                builder = load_dataset_builder("json", data_files=full)
            else:
                builder = load_dataset_builder("parquet", data_files=full, batch_size=_PARQUET_ROWS)
            dataset = builder.as_streaming_dataset(split="train")
    except OpendilocoError:
        raise
    except Exception as error:  # whatever a library finds wrong with a file or an answer
        if scheme == "hf" and (reason := explanation(error)) is not None:
            raise SettingsError(f"data.source is {data.source}, but {reason}") from error
        if isinstance(error, (ConnectionError, FileNotFoundError)):
            raise SettingsError(
                f"data.source is {data.source}, which is neither a folder here nor could it be reached on the hub: "
                f"{_first_line(error)}"
            ) from error
        raise SettingsError(f"data.source {data.source} cannot be read: {_first_line(error)}") from error
    files = tuple(map(str, (builder.config.data_files or {}).get("train", ())))
    return StreamedText(data, dataset, files if len(files) == dataset.num_shards else (), leaving)


def _hub_name(place: str) -> tuple[str, str | None]:
    """Name and configuration in NAME[/CONFIG]. A name has an owner: allenai/c4/en is en of allenai/c4."""
    parts = place.split("/")
    if Path(place).expanduser().is_dir() or len(parts) != 3:
        return str(Path(place).expanduser()) if place.startswith("~") else place, None
    return "/".join(parts[:2]), parts[2]


def _row_texts(dataset: Any, data: DataConfig, *, file: str, skipped: int) -> Iterator[str]:
    """The text of each row; an empty string for a row whose text is null."""
    rows: Iterator[dict[str, Any]] = iter(())
    for number in count(skipped):
        try:
            rows = rows if number > skipped else iter(dataset)
            row = next(rows)
        except StopIteration:
            return
        except MemoryError:
            raise
        except Exception as error:  # whatever the readers of a dozen formats find wrong with a file
            if is_on_hub(data) and (reason := explanation(error)) is not None:
                raise SettingsError(f"data.source is {data.source}, but at {file} {reason}") from error
            raise UnreadableText(
                f"data.source {data.source} cannot be read: {file}, after {number} rows: {_first_line(error)}"
            ) from error
        if data.text_field not in row:
            raise SettingsError(
                f"data.text_field is {data.text_field!r}, but data.source {data.source} has the fields "
                f"{', '.join(sorted(map(str, row)))}: set it to the one that holds the text"
            )
        text = row[data.text_field]
        if text is not None and not isinstance(text, str):
            raise SettingsError(
                f"data.text_field is {data.text_field!r}, which holds {type(text).__name__} and not text in "
                f"data.source {data.source} ({file}, row {number + 1}): set it to another of "
                f"{', '.join(sorted(map(str, row)))}"
            )
        yield text or ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
