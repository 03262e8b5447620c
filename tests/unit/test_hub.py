"""Claims about a hub that stalls, breaks off and refuses: reading goes on exactly where it was, or says why not."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from support.hub import Fault, Hub

from opendiloco import hub as hub_module
from opendiloco import sequences, text
from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.hub import HubAway, HubStopped, Patience
from opendiloco.leave import Leave, run
from opendiloco.text import read_source
from opendiloco.tokenizer import ByteTokenizer
from opendiloco.tokens import training_stream

BYTES = ByteTokenizer()
DATA = DataConfig(source="hf:owner/set", seq_len=32, validation_fraction=0.1, shards=3)
FILES = {
    f"data/train-{shard}.jsonl": "".join(
        json.dumps({"text": f"shard {shard} row {i} " + "word " * (i % 7)}) + "\n" for i in range(100)
    ).encode()
    for shard in range(3)
}


@dataclass
class Time:
    """A clock that runs while somebody sleeps."""

    now_s: float = 100.0
    pauses_s: list[float] = field(default_factory=list)
    after: Callable[[float], None] = lambda now_s: None

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds_s: float) -> None:
        self.now_s += seconds_s
        self.after(self.now_s)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(hub_module, "PATIENCE", Patience(clock=time.clock, sleep=time.sleep))
    return time


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: Time) -> Iterator[Hub]:
    """A hub whose data set is streamed, because the limits are small."""
    monkeypatch.setattr(text, "MEMORY_PIECES", 200)
    monkeypatch.setattr(sequences, "WINDOW_DOCUMENTS", 8)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    with Hub(FILES) as hub:
        hub.use(monkeypatch, tmp_path / "cache")
        yield hub


def read(batches: int = 60) -> list[list[int]]:
    """The next sequences of a stream that is opened for it."""
    stream = training_stream(DATA, BYTES, seed=0, batch_size=4)
    rows = [row for batch in islice(stream, batches) for row in batch.tolist()]
    stream.close()
    return rows


def parquet(lines: bytes) -> bytes:
    """The same rows as a parquet file."""
    buffer = io.BytesIO()
    rows = [json.loads(line) for line in lines.splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, row_group_size=10)
    return buffer.getvalue()


# --- patience ------------------------------------------------------------------------------------------


def failing(times: int, *, pause_s: float = 0.0) -> Callable[[], str]:
    tries = iter(range(times))

    def request() -> str:
        if next(tries, None) is not None:
            raise HubAway("HTTP 503", pause_s=pause_s)
        return "answer"

    return request


def test_pauses_double_up_to_a_minute_with_a_line_a_minute_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    time, moments = Time(), list[float]()
    patience = Patience(clock=time.clock, sleep=time.sleep)
    tries = failing(10)

    def request() -> str:
        moments.append(round(time.now_s - 100))
        return tries()

    with caplog.at_level(logging.INFO):
        assert patience.ask(request, what="GET file", leaving=lambda: False) == "answer"
    assert moments == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243, 303]
    assert [record.getMessage() for record in caplog.records] == [
        "the hub cannot be read (GET file: HTTP 503): trying again until it answers",
        *(
            f"the hub cannot be read, for {since} s now (GET file: HTTP 503): trying again until it answers"
            for since in (63, 123, 183, 243)
        ),
        "the hub is back after 303 s",
    ]


def test_short_failures_one_after_the_other_give_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    patience = Patience(clock=time.clock, sleep=time.sleep)
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            patience.ask(failing(1), what="GET file", leaving=lambda: False)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]


def test_a_hub_that_names_a_pause_gets_it_within_reason() -> None:
    for wish_s, pause_s in ((0.0, 1.0), (30.0, 30.0), (1e6, hub_module.LONGEST_WISH_S)):
        time = Time()
        patience = Patience(clock=time.clock, sleep=time.sleep)
        patience.ask(failing(1, pause_s=wish_s), what="", leaving=lambda: False)
        assert time.now_s - 100 == pytest.approx(pause_s)


def test_whoever_is_asked_to_leave_does_not_wait_for_the_pause_to_end() -> None:
    time = Time(now_s=0.0)
    patience = Patience(clock=time.clock, sleep=time.sleep)
    with pytest.raises(HubStopped):
        patience.ask(failing(100), what="", leaving=lambda: time.now_s > 100)
    assert time.now_s < 101


# --- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_hub_that_misbehaves_in_every_way_gives_the_sequences_of_one_that_does_not(
    hub: Hub, time: Time, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    if kind == "parquet":
        hub.files = {name.replace("jsonl", "parquet"): parquet(content) for name, content in FILES.items()}
    expected = read()
    assert len({tuple(row) for row in expected}) > 200
    while_opening = [Fault("refuse"), Fault("503", "/revision/"), Fault("cut", "/tree/"), Fault("502", "/tree/")]
    while_reading = [
        Fault("429", "train-0", headers={"Retry-After": "7"}),
        Fault("cut", "train-0", times=2),
        Fault("stall", "train-1"),
        Fault("500", "train-1", times=7),
        Fault("refuse", "train-2", times=2),
        Fault("504", "train-2"),
    ]
    hub.forget_listings()
    hub.faults += [*while_opening, *while_reading]
    with caplog.at_level(logging.INFO, "opendiloco"):
        assert read() == expected
    assert not [fault for fault in hub.faults if fault.times]
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("the hub cannot be read") for line in lines)
    assert any(line.startswith("the hub is back after") for line in lines)


def test_training_that_waits_for_a_hub_goes_on_when_it_is_back(hub: Hub, time: Time) -> None:
    """A worker that starts while nothing answers at all."""
    expected = read(5)
    away = Fault("refuse", times=10**6)

    def come_back(now_s: float) -> None:
        if now_s > 4000:
            away.times = 0

    hub.faults, time.after = [away], come_back
    assert read(5) == expected
    assert time.now_s > 4000


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (
            Fault("401", times=99),
            r"no such data set or file \(HTTP 401\): correct the name; if it is private, set HF_T",
        ),
        (Fault("404", times=99), r"no such data set or file \(HTTP 404\): correct the name"),
        (Fault("403", "train-1", times=99), r"at .*train-1.jsonl the hub refuses it \(HTTP 403\): set HF_TOKEN"),
        (
            Fault("403", times=99, headers={"X-Error-Code": "GatedRepo"}),
            "gated: accept its terms on its page .* HF_TOKEN",
        ),
    ],
)
def test_what_no_retry_cures_is_one_line_at_once(hub: Hub, time: Time, fault: Fault, match: str) -> None:
    hub.faults.append(fault)
    with pytest.raises(SettingsError, match=rf"^data\.source is hf:owner/set, but .*{match}") as caught:
        read()
    assert "\n" not in str(caught.value)
    assert time.now_s == 100.0


def test_a_data_set_that_disappears_under_a_worker_ends_it_with_one_line(hub: Hub) -> None:
    stream = training_stream(DATA, BYTES, seed=0, batch_size=4)
    next(stream)
    hub.faults.append(Fault("404", "train", times=10**6))
    with pytest.raises(SettingsError, match=r"at hf://.*jsonl the hub has no such data set or file"):
        list(islice(stream, 200))


def test_leaving_does_not_wait_for_a_hub_that_is_away(hub: Hub, time: Time) -> None:
    hub.faults.append(Fault("503", times=10**6))
    with pytest.raises(Leave):
        run(
            lambda: read_source(DATA, leaving=lambda: time.now_s > 500),
            lambda: time.now_s > 500,
            name="opening the text",
        )


def test_requests_outside_of_reading_text_are_not_repeated(hub: Hub) -> None:
    read(1)
    hub.faults.append(Fault("503"))
    answer = huggingface_hub.get_session().get(f"{hub.endpoint}/api/datasets/owner/set")
    assert answer.status_code == 503


def test_an_answer_that_is_streamed_and_breaks_off_is_whole_in_the_end(hub: Hub, time: Time) -> None:
    """As the library fetches a data set's card."""
    name, content = next(iter(FILES.items()))
    hub.faults.append(Fault("cut", name, times=2))
    url = f"{hub.endpoint}/datasets/owner/set/resolve/main/{name}"
    with hub_module.patient(lambda: False), huggingface_hub.get_session().stream("GET", url) as answer:
        assert b"".join(answer.iter_bytes()) == content
    assert time.now_s > 102
