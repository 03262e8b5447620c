"""Token batches: documents packed into full sequences, from the shards that this worker has leased.

No worker has a number. All of a run know one order of the text, and each reads other shards of it than the others do.
Every stream can be resumed at the exact sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.leases import read_alone
from opendiloco.leave import run
from opendiloco.ledger import MAX_READINGS, Reading
from opendiloco.mixture import Mixture, mixture, split_sources
from opendiloco.prefetch import Prefetched
from opendiloco.progress import Progress
from opendiloco.reader import Lease as Lease
from opendiloco.reader import SourceReader
from opendiloco.sequences import MemorySequences, Sequences, StreamedSequences
from opendiloco.text import MemoryText, StreamedText, digest, is_held_out, read_source
from opendiloco.tokenizer import Tokenizer, Tokens

_BATCH_DOCUMENTS = 256  # of at most 16 KB each, between two looks at the clock


class TokenStream(Iterator[Tensor]):
    """Endless batches of training tokens: int64 [batch_size, seq_len], on the CPU.

    `tokens_seen` counts what was handed out, over restarts too. A batch that fails leaves the position as it was.
    """

    def __init__(self, readers: Sequence[SourceReader], mixture: Mixture, *, batch_size: int) -> None:
        """Args: `readers` of the sources that are mixed."""
        self.tokens_seen = 0
        self._readers, self._mixture, self._batch_size = readers, mixture, batch_size
        self._taken = [0] * len(readers)

    def __next__(self) -> Tensor:
        before = self._taken[:], [reader.state for reader in self._readers]
        try:
            for reader in self._readers:  # all: those that read a source are known from their first round on
                reader.begin()
            rows = [self._next_sequence() for _ in range(self._batch_size)]
        except BaseException:
            self._taken = before[0]
            for reader, state in zip(self._readers, before[1], strict=True):
                reader.return_to(state)
            raise
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        self.tokens_seen += batch.numel()
        return batch

    @property
    def scarcest(self) -> SourceReader:
        """The source with the fewest shards in a pass: so many workers can read different text of it at a time."""
        return min(self._readers, key=lambda reader: reader.shards)

    @property
    def shards(self) -> int:
        """Of one pass over the source that has the fewest."""
        return self.scarcest.shards

    @property
    def readings(self) -> tuple[Reading, ...]:
        """What this worker has read since `renew(reported=True)`, by source and in order; the last one of each source
        is where it is."""
        room = MAX_READINGS // len(self._readers)
        begun = [(reader, reading) for reader in self._readers if (reading := reader.reading) is not None]
        return tuple(each for reader, reading in begun for each in (*reader.finished[1 - room :], reading))

    def renew(self, *, reported: bool) -> None:
        """A round is over: before the next batch, find out whether the shard is another worker's now.

        Args:
            reported: whether the round counts what this worker has read.
        """
        for reader in self._readers:
            reader.renew(reported=reported)

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values. A stream of the same arguments goes on from it at the next batch."""
        sources = [reader.state_dict() for reader in self._readers]
        return {"tokens_seen": self.tokens_seen, "taken": self._taken[:], "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the stream that gave `state` stood, if that shard is still this worker's.

        Raises:
            SettingsError: the state is of another stream or the text has changed; the stream is as before.
        """
        if len(state["sources"]) != len(self._readers):
            raise SettingsError(
                f"data.source names {len(self._readers)} sources and had {len(state['sources'])} at the checkpoint: "
                "restore it, or resume in a new folder"
            )
        states = [reader.state_in(part) for reader, part in zip(self._readers, state["sources"], strict=True)]
        for reader, standing in zip(self._readers, states, strict=True):
            reader.return_to(standing)
        self.tokens_seen, self._taken = int(state["tokens_seen"]), [int(number) for number in state["taken"]]

    def close(self) -> None:
        """End the threads that read ahead."""
        for reader in self._readers:
            reader.close()

    def _next_sequence(self) -> Tokens:
        source = self._mixture.next_source(self._taken)
        sequence = self._readers[source].next_sequence()
        self._taken[source] += 1
        return sequence


def open_text(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    batch_size: int,
    lease: Lease,
    leaving: Callable[[], bool],
) -> tuple[TokenStream, list[Tensor]]:
    """A worker's training batches, which threads make ready, and its validation batches.

    Raises:
        SettingsError: as `training_stream`.
        Leave: as soon as `leaving` says so, whatever is being read or waited for.
    """

    def work() -> tuple[TokenStream, list[Tensor]]:
        validation = validation_batches(data, tokenizer, batch_size=batch_size, leaving=leaving)
        training = training_stream(
            data, tokenizer, seed=seed, batch_size=batch_size, lease=lease, prefetch=True, leaving=leaving
        )
        return training, validation

    return run(work, leaving, name="opening the text")


def training_stream(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    batch_size: int,
    lease: Lease = read_alone,
    prefetch: bool = False,
    leaving: Callable[[], bool] = lambda: False,
) -> TokenStream:
    """Endless training batches in the order that `seed` gives, from the shards that `lease` says.

    Args:
        prefetch: read and tokenize in threads of their own, which end with `TokenStream.close`.
        leaving: ends a wait for text with `Leave`.
    Raises:
        SettingsError: data.source cannot be read, or is too small for data.seq_len.
    """
    sources, weights = split_sources(data)
    readers = []
    for number, part in enumerate(sources):
        sequences = _sequences(part, tokenizer, seed=seed, prefetch=prefetch, leaving=leaving)
        assert isinstance(part.source, str)
        readers.append(SourceReader(sequences, lease, name=part.source, source=number, is_one_of_many=len(sources) > 1))
    return TokenStream(readers, mixture(weights, seed=seed), batch_size=batch_size)


def _sequences(
    data: DataConfig, tokenizer: Tokenizer, *, seed: int, prefetch: bool, leaving: Callable[[], bool]
) -> Sequences:
    """Training sequences of one source. Those of a text in memory are there: nothing to make ready."""
    source = read_source(data, leaving=leaving)
    if isinstance(source, StreamedText):
        streamed = StreamedSequences(source, tokenizer, seed=seed, shards=data.shards)
        if not prefetch:
            return streamed
        return Prefetched(streamed, name=str(data.source), seq_len=data.seq_len, leaving=leaving)
    training, _ = _split(source, data, tokenizer)
    tokens = _tokens_of(training, data, tokenizer)
    return MemorySequences(tokens, seq_len=data.seq_len, source=str(data.source), seed=seed, shards=data.shards)


def validation_batches(
    data: DataConfig, tokenizer: Tokenizer, *, batch_size: int, leaving: Callable[[], bool] = lambda: False
) -> list[Tensor]:
    """The held-out sequences: int64 [at most batch_size, seq_len] each, the same on every peer.

    At most data.validation_sequences sequences in all, of each source its share; at least one of each.
    Raises:
        SettingsError: as `training_stream`.
    """
    sources, weights = split_sources(data)
    shares = mixture(weights, seed=0).shares(data.validation_sequences)
    rows = [
        _held_out(part.model_copy(update={"validation_sequences": share}), tokenizer, leaving)
        for part, share in zip(sources, shares, strict=True)
    ]
    return list(torch.split(torch.cat(rows), batch_size))


def _held_out(data: DataConfig, tokenizer: Tokenizer, leaving: Callable[[], bool]) -> Tensor:
    """The held-out sequences of one source: int64 [at most data.validation_sequences, seq_len]."""
    source = read_source(data, leaving=leaving)
    if isinstance(source, StreamedText):
        tokens = _held_out_of_stream(source, data, tokenizer)
    else:
        tokens = _tokens_of(_split(source, data, tokenizer)[1], data, tokenizer)
    count = min(len(tokens) // data.seq_len, data.validation_sequences)
    return torch.from_numpy(tokens[: count * data.seq_len].astype(np.int64)).view(count, data.seq_len)


def check_length(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise SettingsError where a small source is too short for a training and a held-out sequence."""
    if isinstance(source := read_source(data), MemoryText):
        _split(source, data, tokenizer)


def _split(text: MemoryText, data: DataConfig, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Training and held-out documents; each part has at least one sequence.

    A document is held out by its hash. When these do not fill a sequence (a small text), the next ones in
    the order of the hashes are held out as well.
    """
    documents = list(text.documents)
    held = sum(is_held_out(digest(d), data.validation_fraction) for d in documents)
    held_tokens = len(_tokens_of(documents[:held], data, tokenizer))
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


def _tokens_of(documents: Sequence[str], data: DataConfig, tokenizer: Tokenizer) -> Tokens:
    """The documents of a source as `Tokenizer.encode_documents` gives them; a slow tokenizer takes minutes for many."""
    totals = {"documents": len(documents), "MB": _megabytes(documents), "tokens": None}
    progress, parts = Progress(f"tokenizing {data.source}", totals), []
    for start in range(0, len(documents), _BATCH_DOCUMENTS):
        batch = documents[start : start + _BATCH_DOCUMENTS]
        parts.append(tokenizer.encode_documents(batch))
        progress.advance({"documents": len(batch), "MB": _megabytes(batch), "tokens": len(parts[-1])})
    return np.concatenate(parts) if parts else tokenizer.encode_documents([])


def _megabytes(documents: Sequence[str]) -> float:
    return sum(map(len, documents)) / 1e6


def _held_out_of_stream(source: StreamedText, data: DataConfig, tokenizer: Tokenizer) -> Tokens:
    parts: list[Tokens] = []
    total, wanted = 0, data.validation_sequences * data.seq_len
    progress = Progress(
        f"looking for held-out text in {data.source}", {"documents": None, "MB": None, "held-out tokens": wanted}
    )
    for shard in range(source.shard_count):
        for pieces in source.rows(shard):
            held = [p for p in pieces if is_held_out(digest(p), data.validation_fraction)]
            if held:
                parts.append(tokenizer.encode_documents(held))
                total += len(parts[-1])
            if total >= wanted:
                return np.concatenate(parts)
            new_tokens = len(parts[-1]) if held else 0
            progress.advance({"documents": len(pieces), "MB": _megabytes(pieces), "held-out tokens": new_tokens})
    if total < data.seq_len:
        raise SettingsError(
            f"data.seq_len is {data.seq_len} but the held-out part of data.source {data.source} has only {total} "
            f"tokens: lower data.seq_len or raise data.validation_fraction ({data.validation_fraction})"
        )
    return np.concatenate(parts)
