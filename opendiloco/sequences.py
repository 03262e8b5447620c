"""Sequences: the order in which one worker reads the training text, endless and resumable.

The order follows from the run's seed and a string of the worker's own, never from a number given to it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from opendiloco.errors import SettingsError
from opendiloco.text import StreamedText, digest, is_held_out
from opendiloco.tokenizer import Tokenizer, Tokens

WINDOW_DOCUMENTS = 1_024
"""Documents of a streamed source that are shuffled together."""
MAX_GROUPS = 8
"""Parts into which a stream divides a source with few shards, one per pass, so that workers differ."""
ENOUGH_SHARDS = 64
"""Shards from which on their order alone makes workers read different text."""


class Sequences(Protocol):
    """An endless, resumable order of training sequences."""

    def next_sequence(self) -> Tokens:
        """Token ids [seq_len]."""

    def state_dict(self) -> dict[str, Any]:
        """The position before the next sequence."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a position."""


class MemorySequences:
    """Sequences of a text in memory: each pass cuts it at another offset and takes another permutation."""

    def __init__(self, tokens: Tokens, *, seq_len: int, source: str, seed: int, stream: str) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._source = source
        self._seed = seed
        self._stream = stream
        self._start_pass(0)

    def next_sequence(self) -> Tokens:
        if self._position == len(self._order):
            self._start_pass(self._pass + 1)
        start = self._offset + int(self._order[self._position]) * self._seq_len
        self._position += 1
        return self._tokens[start : start + self._seq_len]

    def state_dict(self) -> dict[str, Any]:
        return {
            "stream": self._stream,
            "seed": self._seed,
            "source_tokens": len(self._tokens),
            "pass": self._pass,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_same_stream(state, seed=self._seed, stream=self._stream)
        if state.get("source_tokens") != len(self._tokens):
            raise SettingsError(
                f"data.source {self._source} has {len(self._tokens)} training tokens here and had "
                f"{state.get('source_tokens')} at the checkpoint: restore the text, or resume in a new folder"
            )
        self._start_pass(int(state["pass"]))
        self._position = int(state["position"])

    def _start_pass(self, number: int) -> None:
        self._pass = number
        self._position = 0
        shifts = min(self._seq_len, len(self._tokens) - self._seq_len + 1)
        self._offset = _key("offset", self._seed, self._stream, number) % shifts
        count = (len(self._tokens) - self._offset) // self._seq_len
        self._order = permutation(count, "sequences", self._seed, self._stream, number)


@dataclass(frozen=True)
class Position:
    """A place in a streamed source: the pass, the place in its order of shards, rows read of that shard."""

    number: int = 0
    shard: int = 0
    rows: int = 0


class StreamedSequences:
    """Sequences of a streamed source, made window by window: documents are read, shuffled and packed.

    The state is the window's start, the tokens left over from the one before (less than a sequence), and
    how many sequences of the window are out: a resume reads the window again and loses nothing, which a
    shuffle buffer that drops and refills could not promise.
    """

    def __init__(self, source: StreamedText, tokenizer: Tokenizer, *, seed: int, stream: str) -> None:
        self._source = source
        self._data = source.data
        self._tokenizer = tokenizer
        self._seed = seed
        self._stream = stream
        self._groups = max(1, min(MAX_GROUPS, ENOUGH_SHARDS // source.shard_count))
        self._emitted = 0
        self._window: Tokens = np.empty(0, np.uint16)
        self._go_to(Position(), carry=self._window)

    def next_sequence(self) -> Tokens:
        seq_len = self._data.seq_len
        while (self._emitted + 1) * seq_len > len(self._window):
            carry = self._window[self._emitted * seq_len :]
            self._start, self._carry, self._emitted = self._end, carry, 0
            self._window = self._read_window()
        start = self._emitted * seq_len
        self._emitted += 1
        return self._window[start : start + seq_len]

    def state_dict(self) -> dict[str, Any]:
        return {
            "stream": self._stream,
            "seed": self._seed,
            "start": asdict(self._start),
            "carry": self._carry.tolist(),
            "emitted": self._emitted,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_same_stream(state, seed=self._seed, stream=self._stream)
        if "start" not in state:
            raise SettingsError(
                f"data.source {self._data.source} was small enough for memory at the checkpoint and is streamed "
                "here: restore the text, or resume in a new folder"
            )
        self._go_to(Position(**state["start"]), carry=np.array(state["carry"], np.int32))
        self._window = self._read_window()
        self._emitted = int(state["emitted"])

    def _go_to(self, start: Position, *, carry: Tokens) -> None:
        self._start = self._end = start
        self._carry = self._window = carry
        self._emitted = 0
        self._rows = self._rows_from(start)

    def _read_window(self) -> Tokens:
        """Read on from the start: sets the end, returns the carry and the window's shuffled documents."""
        documents: list[str] = []
        for position, pieces in self._rows:
            self._end = position
            documents += pieces
            if len(documents) >= WINDOW_DOCUMENTS or position.number > self._start.number:
                break
        order = permutation(len(documents), "window", self._seed, self._stream, *asdict(self._start).values())
        new = self._tokenizer.encode_documents([documents[i] for i in order])
        return np.concatenate([self._carry.astype(new.dtype), new])

    def _rows_from(self, start: Position) -> Iterator[tuple[Position, list[str]]]:
        """Training documents of each row from a position on, for ever, with the position after them."""
        count = self._source.shard_count
        first, done = start.shard, start.rows
        for number in itertools.count(start.number):
            order = permutation(count, "shards", self._seed, self._stream, number)
            for place in range(first, count):
                rows = self._source.rows(int(order[place]), skip=done)
                for read, pieces in enumerate(rows, start=done + 1):
                    yield Position(number, place, read), [p for p in pieces if self._wanted(p, number)]
                done = 0
            first = 0
            yield Position(number + 1), []

    def _wanted(self, document: str, number: int) -> bool:
        """Each pass takes one of the groups into which this stream's own hash divides the training part."""
        value = digest(document)
        if is_held_out(value, self._data.validation_fraction):
            return False
        return _key("group", self._seed, self._stream, value) % self._groups == number % self._groups


def permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """A permutation of range(count) that follows from the key alone, on every machine and NumPy version."""
    raw = np.random.PCG64(_key(*key)).random_raw(count)  # raw bits: the only stream NumPy promises to keep
    return np.argsort(raw, kind="stable")


def _key(*parts: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest(), "big")


def _check_same_stream(state: dict[str, Any], *, seed: int, stream: str) -> None:
    if state.get("stream") != stream or state.get("seed") != seed:
        raise SettingsError(
            f"the data position in the checkpoint is of stream {state.get('stream')} with run.seed "
            f"{state.get('seed')}, here they are {stream} and {seed}: resume with the same swarm.identity and "
            "run.seed"
        )
