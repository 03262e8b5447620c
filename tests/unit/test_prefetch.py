"""Claims about reading ahead: nobody waits for what could be ready, and no position or lease depends on it."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import datasets
import pytest
import torch

from opendiloco import prefetch, sequences, text
from opendiloco.config import DataConfig
from opendiloco.leases import Leases
from opendiloco.leave import Leave
from opendiloco.ledger import Ledger, Reading
from opendiloco.tokenizer import ByteTokenizer, Tokens
from opendiloco.tokens import TokenStream, training_stream

WAIT_S = 20.0  # until something is taken not to come


class SlowTokenizer(ByteTokenizer):
    """Waits for permission before each window, and counts them."""

    def __init__(self) -> None:
        self.may_go_on, self.windows = threading.Semaphore(0), 0
        self.is_asked = threading.Semaphore(0)
        self.fails_at: int | None = None

    def encode_documents(self, documents: Sequence[str]) -> Tokens:
        self.is_asked.release()
        assert self.may_go_on.acquire(timeout=WAIT_S)
        self.windows += 1
        if self.windows == self.fails_at:
            raise RuntimeError("the tokenizer broke")
        return super().encode_documents(documents)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """3 files of 100 rows, which are streamed in windows of 8 documents because the limits are small."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr(text, "MEMORY_PIECES", 200)
    monkeypatch.setattr(sequences, "WINDOW_DOCUMENTS", 8)
    for shard in range(3):
        lines = [json.dumps({"text": f"shard {shard} row {i} " + "word " * (i % 7)}) for i in range(100)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return DataConfig(source=f"jsonl:{tmp_path}", seq_len=32, validation_fraction=0.1, shards=3)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowTokenizer:
    """A tokenizer a window of which fills the space for what is ready."""
    monkeypatch.setattr(prefetch, "AHEAD_TOKENS", 8 * 32)
    return SlowTokenizer()


@pytest.fixture
def opened() -> Iterator[Callable[..., TokenStream]]:
    """Opens streams that read ahead; closes them, and no thread is left."""
    before, streams = set(threading.enumerate()), list[TokenStream]()

    def open(data: DataConfig, tokenizer: ByteTokenizer | None = None, **options: object) -> TokenStream:
        arguments = {"seed": 0, "batch_size": 4, "prefetch": True, **options}
        stream = training_stream(data, tokenizer or ByteTokenizer(), **arguments)  # type: ignore[arg-type]
        streams.append(stream)
        return stream

    yield open
    for stream in streams:
        stream.close()
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name == "prefetch"]


def plain(data: DataConfig, **options: object) -> TokenStream:
    return training_stream(data, ByteTokenizer(), seed=0, batch_size=4, **options)  # type: ignore[arg-type]


def take_until(error: type[Exception], *streams: TokenStream) -> int:
    """How many batches come, equal ones, before the first stream raises."""
    for batches in itertools.count():
        try:
            batch = next(streams[0])
        except error:
            return batches
        assert all(torch.equal(batch, next(stream)) for stream in streams[1:])
    raise AssertionError


def test_the_next_window_is_tokenized_while_this_one_is_trained_on(
    data: DataConfig, slow: SlowTokenizer, opened: Callable[..., TokenStream]
) -> None:
    stream = opened(data, slow)
    slow.may_go_on.release()
    next(stream)  # the training thread has its batch; nobody asks for another one
    for _ in range(2):
        assert slow.is_asked.acquire(timeout=WAIT_S)  # and the second window is on its way all the same
    slow.may_go_on.release(50)


def test_only_so_much_is_read_ahead(data: DataConfig, slow: SlowTokenizer, opened: Callable[..., TokenStream]) -> None:
    stream = opened(data, slow)
    slow.may_go_on.release(1000)
    next(stream)
    reader = stream._readers[0]._sequences
    assert isinstance(reader, prefetch.Prefetched)
    with reader._changed:
        assert reader._changed.wait_for(lambda: len(reader._made) == 8, WAIT_S)
    assert slow.windows < 6


@pytest.mark.parametrize("batches", [0, 1, 13, 60])
def test_batches_readings_and_position_are_those_without_reading_ahead(
    data: DataConfig, opened: Callable[..., TokenStream], batches: int
) -> None:
    ahead, expected = opened(data), plain(data)
    for _ in range(batches):
        assert torch.equal(next(ahead), next(expected))
    assert ahead.readings == expected.readings
    assert ahead.state_dict() == expected.state_dict()
    resumed = opened(data)
    next(resumed)
    resumed.load_state_dict(json.loads(json.dumps(ahead.state_dict())))
    for _ in range(20):
        expected_batch = next(expected)
        assert torch.equal(next(resumed), expected_batch)
        assert torch.equal(next(ahead), expected_batch)


class Lessee:
    """What a swarm leases to a worker, which sees another one."""

    def __init__(self) -> None:
        self.ledger, self._leases = Ledger(), Leases("a")

    def lease(self, at: Reading | None, source: int, shards: int) -> Reading:
        return self._leases.lease(at, self.ledger, {"b": [1]}, shards=shards, source=source)


@pytest.mark.parametrize("known", [Reading(shard=0, done=True), Reading(shard=0, rows=56, sequences=2)])
def test_what_was_read_ahead_is_dropped_uncounted_when_another_worker_has_the_shard(
    data: DataConfig, opened: Callable[..., TokenStream], known: Reading
) -> None:
    """After the first round its shard turns out to be read to its end, or further."""
    workers = [Lessee(), Lessee()]
    ahead, expected = opened(data, lease=workers[0].lease), plain(data, lease=workers[1].lease)
    assert torch.equal(next(ahead), next(expected))
    assert ahead.readings == expected.readings
    for worker in workers:
        worker.ledger = Ledger().after({"b": (known, Reading(shard=1, rows=8))})
    for stream in (ahead, expected):
        stream.renew(reported=True)
    for _ in range(30):
        assert torch.equal(next(ahead), next(expected))
        assert ahead.readings == expected.readings


def test_an_error_comes_with_the_batch_that_it_concerns(
    data: DataConfig, slow: SlowTokenizer, opened: Callable[..., TokenStream]
) -> None:
    expected = plain(data)
    stream = opened(data, slow)
    slow.fails_at = 3
    slow.may_go_on.release(1000)
    batches = take_until(RuntimeError, stream, expected)
    assert batches > 2
    before = plain(data)
    for _ in range(batches):
        next(before)
    assert stream.state_dict() == before.state_dict()
    for _ in range(20):  # the tokenizer has recovered
        assert torch.equal(next(stream), next(before))


def test_leaving_while_text_is_awaited_keeps_the_position(
    data: DataConfig, slow: SlowTokenizer, opened: Callable[..., TokenStream]
) -> None:
    is_leaving = threading.Event()
    stream = opened(data, slow, leaving=is_leaving.is_set)
    slow.may_go_on.release(2)
    for _ in range(2):
        next(stream)
    is_leaving.set()
    taken = 2 + take_until(Leave, stream)
    slow.may_go_on.release(1000)
    expected = plain(data)
    for _ in range(taken):
        next(expected)
    assert stream.state_dict() == expected.state_dict()


def test_a_stream_that_was_never_read_has_no_thread(data: DataConfig) -> None:
    before = threading.active_count()
    with closing(training_stream(data, ByteTokenizer(), seed=0, batch_size=4, prefetch=True)):
        assert threading.active_count() == before
