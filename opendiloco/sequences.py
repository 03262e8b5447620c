"""Sequences of the training text, shard by shard: an order that all workers of a run have in common, and resumable.

The order of each pass follows from the run's seed alone. Which shards of it a worker reads is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from opendiloco.errors import SettingsError
from opendiloco.ledger import Reading
from opendiloco.text import StreamedText, UnreadableText, digest, is_held_out
from opendiloco.tokenizer import Tokenizer, Tokens

WINDOW_DOCUMENTS = 1_024
"""Documents of a streamed source that are shuffled together."""
MAX_GROUPS = 8
"""Shards into which a file is cut at most: the worker of one of them reads the whole file and takes its documents."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Bookmark:
    """A place before a sequence, and the tokens that were left over there."""

    reading: Reading
    carry: Tokens = field(default_factory=lambda: np.empty(0, np.int32), repr=False)


class Sequences(Protocol):
    """The training sequences of the shards of a source."""

    shards: int
    """Of one pass over the text."""

    @property
    def bookmark(self) -> Bookmark:
        """Where the next sequence comes from."""

    def go_to(self, reading: Reading) -> None:
        """Read on from there."""

    def return_to(self, bookmark: Bookmark) -> None:
        """Go on as if it had never left there."""

    def next_sequence(self) -> Tokens | None:
        """Token ids [seq_len]; None, and the reading is done, when the shard is at its end."""

    def state_of(self, bookmark: Bookmark) -> dict[str, Any]:
        """A place as JSON values; any thread may ask."""

    def bookmark_of(self, state: dict[str, Any]) -> Bookmark:
        """The place that `state_of` wrote. Raises SettingsError if it is in another order or text."""

    def close(self) -> None:
        """End what runs for it, and a wait for the hub in another thread."""


class MemorySequences:
    """Sequences of a text in memory. Each pass cuts it at another offset and puts the sequences in another order."""

    def __init__(self, tokens: Tokens, *, seq_len: int, source: str, seed: int, shards: int) -> None:
        """Args: `shards` to cut a pass into; a small text gives one for each sequence."""
        self._tokens, self._seq_len = tokens, seq_len
        self._source, self._seed = source, seed
        self._shifts = min(seq_len, len(tokens) - seq_len + 1)
        self.shards = min(shards, (len(tokens) - self._shifts + 1) // seq_len)
        self._start_pass(0)
        self.reading = Reading(shard=0)

    @property
    def bookmark(self) -> Bookmark:
        return Bookmark(self.reading)

    def go_to(self, reading: Reading) -> None:
        if reading.shard // self.shards != self._pass:
            self._start_pass(reading.shard // self.shards)
        self.reading = reading

    def return_to(self, bookmark: Bookmark) -> None:
        self.go_to(bookmark.reading)

    def next_sequence(self) -> Tokens | None:
        taken, count = self.reading.sequences, len(self._order)
        index = self.reading.shard % self.shards
        first, last = index * count // self.shards, (index + 1) * count // self.shards
        if first + taken >= last:
            self.reading = self.reading.model_copy(update={"done": True})
            return None
        self.reading = self.reading.model_copy(update={"sequences": taken + 1})
        start = self._offset + int(self._order[first + taken]) * self._seq_len
        return self._tokens[start : start + self._seq_len]

    def state_of(self, bookmark: Bookmark) -> dict[str, Any]:
        return {"seed": self._seed, "source_tokens": len(self._tokens), "reading": bookmark.reading.model_dump()}

    def bookmark_of(self, state: dict[str, Any]) -> Bookmark:
        _check_same_order(state, self._seed)
        if state.get("source_tokens") != len(self._tokens):
            raise SettingsError(
                f"data.source {self._source} has {len(self._tokens)} training tokens here and had "
                f"{state.get('source_tokens')} at the checkpoint: restore the text, or resume in a new folder"
            )
        return Bookmark(Reading.model_validate(state["reading"]))

    def close(self) -> None:
        """Nothing runs for it."""

    def _start_pass(self, number: int) -> None:
        self._pass = number
        self._offset = _key("offset", self._seed, number) % self._shifts
        count = (len(self._tokens) - self._offset) // self._seq_len
        self._order = permutation(count, "sequences", self._seed, number)


class StreamedSequences:
    """Sequences of a streamed source, made window by window: documents are read, shuffled and packed.

    A place is the window's start and how many sequences of it are out; the tokens left over from what was read before
    (less than a sequence) belong to the worker. A resume reads the window again and loses nothing, which a shuffle
    buffer that drops and refills could not promise.
    """

    def __init__(self, source: StreamedText, tokenizer: Tokenizer, *, seed: int, shards: int) -> None:
        """Args: `shards` to cut a pass into; a file gives `MAX_GROUPS` of them at most."""
        self._source, self._data, self._tokenizer, self._seed = source, source.data, tokenizer, seed
        self._groups = max(1, min(MAX_GROUPS, shards // source.shard_count))
        self.shards = min(shards, source.shard_count * self._groups)
        self._left_out = 0
        self._rows = self._rows_from(Reading(shard=0))
        self.return_to(Bookmark(Reading(shard=0)))

    @property
    def reading(self) -> Reading:
        return self._start.model_copy(update={"sequences": self._emitted, "done": self._is_done})

    @property
    def bookmark(self) -> Bookmark:
        return Bookmark(self.reading, self._carry)

    def go_to(self, reading: Reading) -> None:
        if reading != self.reading:
            self.return_to(Bookmark(reading, self._left() if self._is_done else self._carry[:0]))

    def return_to(self, bookmark: Bookmark) -> None:
        reading = bookmark.reading
        self._carry: Tokens = bookmark.carry
        self._start = self._end = reading.model_copy(update={"sequences": 0, "done": False})
        self._rows.close()  # at once, and not when its memory is collected: it holds what it reads from
        self._rows = self._rows_from(self._start)
        self._emitted, self._is_done = reading.sequences, reading.done
        self._window, self._is_last = self._carry, False
        self._is_read = not self._emitted  # else the window is read again once it is needed

    def next_sequence(self) -> Tokens | None:
        seq_len = self._data.seq_len
        if not self._is_read:
            self._read_window()
        while (self._emitted + 1) * seq_len > len(self._window):
            if self._is_last:
                self._is_done = True
                return None
            self._carry, self._start, self._emitted = self._left(), self._end, 0
            self._read_window()
        start = self._emitted * seq_len
        self._emitted += 1
        return self._window[start : start + seq_len]

    def state_of(self, bookmark: Bookmark) -> dict[str, Any]:
        return {"seed": self._seed, "reading": bookmark.reading.model_dump(), "carry": bookmark.carry.tolist()}

    def bookmark_of(self, state: dict[str, Any]) -> Bookmark:
        _check_same_order(state, self._seed)
        if "carry" not in state:
            raise SettingsError(
                f"data.source {self._data.source} was small enough for memory at the checkpoint and is streamed "
                "here: restore the text, or resume in a new folder"
            )
        return Bookmark(Reading.model_validate(state["reading"]), np.array(state["carry"], np.int32))

    def close(self) -> None:
        self._source.stopped.set()
        with contextlib.suppress(ValueError):  # a thread is reading: it closes them when it ends
            self._rows.close()

    def _left(self) -> Tokens:
        """Tokens of the window that are in no sequence."""
        if not self._is_read:
            self._read_window()
        return self._window[self._emitted * self._data.seq_len :]

    def _read_window(self) -> None:
        """Read on from the window's start: what was left over, then the window's documents in another order."""
        documents: list[str] = []
        self._is_read = self._is_last = True
        for place, pieces in self._rows:
            self._end = place
            documents += pieces
            if len(documents) >= WINDOW_DOCUMENTS:
                self._is_last = False
                break
        order = permutation(len(documents), "window", self._seed, self._start.shard, *self._start.place)
        new = self._tokenizer.encode_documents([documents[i] for i in order])
        self._window = np.concatenate([self._carry.astype(new.dtype), new])

    def _rows_from(self, start: Reading) -> Generator[tuple[Reading, list[str]], None, None]:
        """Training documents of each row of the shard from a place on, with the place after them."""
        number, index = divmod(start.shard, self.shards)
        files, count = permutation(self._source.shard_count, "files", self._seed, number), self._source.shard_count
        mine = files[index :: self.shards] if self.shards < count else files[index % count : index % count + 1]
        done = start.rows
        for place in range(start.files, len(mine)):
            rows = self._readable(self._source.rows(int(mine[place]), skip=done))
            for read, pieces in enumerate(rows, start=done + 1):
                wanted = [piece for piece in pieces if self._is_wanted(piece, number, index // count)]
                yield Reading(shard=start.shard, files=place, rows=read), wanted
            done = 0

    def _readable(self, rows: Iterator[list[str]]) -> Iterator[list[str]]:
        """The rows of a file up to where it is broken: one bad file of thousands must not end a run."""
        try:
            yield from rows
        except UnreadableText as error:
            self._left_out += 1
            if self._left_out.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
                logger.warning("%s: the rest of it is left out (files left out so far: %d)", error, self._left_out)

    def _is_wanted(self, document: str, number: int, group: int) -> bool:
        """Whether a training document of a file belongs to one of the groups into which this pass divides the file."""
        value = digest(document)
        if is_held_out(value, self._data.validation_fraction):
            return False
        return self._groups == 1 or _key("group", self._seed, number, value) % self._groups == group


def permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """A permutation of range(count) that follows from the key alone, on every machine and NumPy version."""
    raw = np.random.PCG64(_key(*key)).random_raw(count)  # raw bits: the only stream NumPy promises to keep
    return np.argsort(raw, kind="stable")


def _key(*parts: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest(), "big")


def _check_same_order(state: dict[str, Any], seed: int) -> None:
    if state.get("seed") != seed or "reading" not in state:
        raise SettingsError(
            f"the data position in the checkpoint is one of run.seed {state.get('seed')}, here it is {seed}: resume "
            "with the same run.seed"
        )
