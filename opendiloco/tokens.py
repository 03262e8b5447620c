"""Token batches: documents packed into full sequences, from the shards that this worker has leased.

No worker has a number. All of a run know one order of the text, and each reads other shards of it than the others do.
Every stream can be resumed at the exact sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.leases import read_alone
from opendiloco.ledger import MAX_READINGS, Reading
from opendiloco.sequences import MemorySequences, Sequences, StreamedSequences
from opendiloco.text import MemoryText, StreamedText, digest, is_held_out, read_source
from opendiloco.tokenizer import Tokenizer, Tokens

Lease = Callable[[Reading | None], Reading]
"""Where to read on: takes where this worker is (None at the start), gives the same place or one in another shard."""

logger = logging.getLogger(__name__)


class TokenStream(Iterator[Tensor]):
    """Endless batches of training tokens: int64 [batch_size, seq_len], on the CPU.

    `tokens_seen` counts what was handed out, over restarts too.
    """

    def __init__(self, sequences: Sequences, *, batch_size: int, lease: Lease = read_alone) -> None:
        self.tokens_seen = 0
        self._sequences, self._batch_size, self._lease = sequences, batch_size, lease
        self._finished: list[Reading] = []
        self._has_begun = self._has_lease = False
        self._pass = 0

    def __next__(self) -> Tensor:
        if not self._has_lease:
            self._go_to(self._lease(self._sequences.reading if self._has_begun else None))
        rows = [self._next_sequence() for _ in range(self._batch_size)]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        self.tokens_seen += batch.numel()
        return batch

    @property
    def shards(self) -> int:
        """Of one pass over the text: so many workers can read different text at a time."""
        return self._sequences.shards

    @property
    def readings(self) -> tuple[Reading, ...]:
        """What this worker has read since `renew(reported=True)`, in order; the last one is where it is."""
        return (*self._finished[1 - MAX_READINGS :], self._sequences.reading) if self._has_begun else ()

    def renew(self, *, reported: bool) -> None:
        """A round is over: before the next batch, find out whether the shard is another worker's now.

        Args:
            reported: whether the round counts what this worker has read.
        """
        if reported:
            self._finished.clear()
        self._has_lease = False

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values. A stream of the same arguments goes on from it at the next batch."""
        return {"tokens_seen": self.tokens_seen, "has_begun": self._has_begun, **self._sequences.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the stream that gave `state` stood, if that shard is still this worker's.

        Raises:
            SettingsError: the state is of another stream or the text has changed; the stream is as before.
        """
        self._sequences.load_state_dict(state)
        self.tokens_seen, self._has_begun = int(state["tokens_seen"]), bool(state["has_begun"])
        self._pass = self._sequences.reading.shard // self.shards
        self.renew(reported=True)

    def _next_sequence(self) -> Tokens:
        while (sequence := self._sequences.next_sequence()) is None:
            done = self._sequences.reading
            self._finished.append(done)
            self._go_to(self._lease(done))
        return sequence

    def _go_to(self, reading: Reading) -> None:
        self._has_begun = self._has_lease = True
        self._sequences.go_to(reading)
        if (number := reading.shard // self.shards) > self._pass:
            self._pass = number
            logger.info("pass %d over the text begins", number + 1)


def training_stream(
    data: DataConfig, tokenizer: Tokenizer, *, seed: int, batch_size: int, lease: Lease = read_alone
) -> TokenStream:
    """Endless training batches in the order that `seed` gives, from the shards that `lease` says.

    Raises:
        SettingsError: data.source cannot be read, or is too small for data.seq_len.
    """
    source = read_source(data)
    sequences: Sequences
    if isinstance(source, StreamedText):
        sequences = StreamedSequences(source, tokenizer, seed=seed, shards=data.shards)
    else:
        training, _ = _split(source, data, tokenizer)
        tokens = tokenizer.encode_documents(training)
        sequences = MemorySequences(tokens, seq_len=data.seq_len, source=data.source, seed=seed, shards=data.shards)
    return TokenStream(sequences, batch_size=batch_size, lease=lease)


def validation_batches(data: DataConfig, tokenizer: Tokenizer, *, batch_size: int) -> list[Tensor]:
    """The held-out sequences: int64 [at most batch_size, seq_len] each, the same on every peer.

    At most data.validation_sequences sequences in all; at least one.
    Raises:
        SettingsError: as `training_stream`.
    """
    source = read_source(data)
    if isinstance(source, StreamedText):
        tokens = _held_out_of_stream(source, data, tokenizer)
    else:
        tokens = tokenizer.encode_documents(_split(source, data, tokenizer)[1])
    count = min(len(tokens) // data.seq_len, data.validation_sequences)
    rows = torch.from_numpy(tokens[: count * data.seq_len].astype(np.int64)).view(count, data.seq_len)
    return list(torch.split(rows, batch_size))


def _split(text: MemoryText, data: DataConfig, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Training and held-out documents; each part has at least one sequence.

    A document is held out by its hash. When these do not fill a sequence (a small text), the next ones in
    the order of the hashes are held out as well.
    """
    documents = list(text.documents)
    held = sum(is_held_out(digest(d), data.validation_fraction) for d in documents)
    held_tokens = len(tokenizer.encode_documents(documents[:held]))
    while held_tokens < data.seq_len and held < len(documents):
        held_tokens += len(tokenizer.encode_documents(documents[held : held + 1]))
        held += 1
    training_tokens = 0
    for document in documents[held:]:
        training_tokens += len(tokenizer.encode_documents([document]))
        if training_tokens >= data.seq_len:
            return documents[held:], documents[:held]
    total = held_tokens + training_tokens
    raise SettingsError(
        f"data.seq_len is {data.seq_len} but data.source {data.source} has only {total} tokens in "
        f"{len(documents)} documents, too few for a training and a held-out sequence: lower data.seq_len or "
        "use more text"
    )


def _held_out_of_stream(source: StreamedText, data: DataConfig, tokenizer: Tokenizer) -> Tokens:
    parts: list[Tokens] = []
    total = 0
    for shard in range(source.shard_count):
        for pieces in source.rows(shard):
            held = [p for p in pieces if is_held_out(digest(p), data.validation_fraction)]
            if held:
                parts.append(tokenizer.encode_documents(held))
                total += len(parts[-1])
            if total >= data.validation_sequences * data.seq_len:
                return np.concatenate(parts)
    if total < data.seq_len:
        raise SettingsError(
            f"data.seq_len is {data.seq_len} but the held-out part of data.source {data.source} has only {total} "
            f"tokens: lower data.seq_len or raise data.validation_fraction ({data.validation_fraction})"
        )
    return np.concatenate(parts)
