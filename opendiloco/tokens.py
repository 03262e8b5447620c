"""Token batches: documents packed into full sequences, in an order of each worker's own.

No worker has a number. What a worker reads follows from the run's seed and a string of its own (its public
key): each pass over the text is another permutation. Every stream can be resumed at the exact sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.sequences import MemorySequences, Sequences, StreamedSequences
from opendiloco.text import MemoryText, StreamedText, digest, is_held_out, read_source
from opendiloco.tokenizer import Tokenizer, Tokens


class TokenStream(Iterator[Tensor]):
    """Endless batches of training tokens: int64 [batch_size, seq_len], on the CPU.

    `tokens_seen` counts what was handed out, over restarts too.
    """

    def __init__(self, sequences: Sequences, *, batch_size: int) -> None:
        self.tokens_seen = 0
        self._sequences = sequences
        self._batch_size = batch_size

    def __next__(self) -> Tensor:
        rows = [self._sequences.next_sequence() for _ in range(self._batch_size)]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        self.tokens_seen += batch.numel()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values. A stream of the same arguments goes on from it at the next batch."""
        return {"tokens_seen": self.tokens_seen, **self._sequences.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the stream that gave `state` stood.

        Raises:
            SettingsError: the state is of another stream or the text has changed; the stream is as before.
        """
        self._sequences.load_state_dict(state)
        self.tokens_seen = int(state["tokens_seen"])


def training_stream(data: DataConfig, tokenizer: Tokenizer, *, seed: int, stream: str, batch_size: int) -> TokenStream:
    """Endless training batches in the order that `seed` and `stream` (a peer's public key) give.

    Raises:
        SettingsError: data.source cannot be read, or is too small for data.seq_len.
    """
    source = read_source(data)
    if isinstance(source, StreamedText):
        return TokenStream(StreamedSequences(source, tokenizer, seed=seed, stream=stream), batch_size=batch_size)
    training, _ = _split(source, data, tokenizer)
    tokens = tokenizer.encode_documents(training)
    return TokenStream(
        MemorySequences(tokens, seq_len=data.seq_len, source=data.source, seed=seed, stream=stream),
        batch_size=batch_size,
    )


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
