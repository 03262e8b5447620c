"""metrics.jsonl is always valid and never stops training; log lines go where they belong."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from opendiloco.errors import SettingsError
from opendiloco.metrics import (
    CatchUpEvent,
    EvalEvent,
    Event,
    InnerStepEvent,
    JoinEvent,
    LeaveEvent,
    MetricsLog,
    RoundEvent,
    WarningEvent,
    read_metrics,
    setup_logging,
)

CONTRACT = {  # keys of every kind of line, as users and scripts rely on them
    JoinEvent: "round lineage source donors received_bytes seconds_s params_hash",
    InnerStepEvent: "round inner_step global_inner_step loss lr grad_norm tokens_seen tokens_per_s",
    RoundEvent: "round verdict participants weights lineage params_hash loss inner_steps tokens shards swarm_tokens "
    "inner_s wait_s rendezvous_s allreduce_s outer_s sent_bytes received_bytes codec pseudo_gradient_norm "
    "outer_gradient_norm",
    CatchUpEvent: "round lineage donors received_bytes seconds_s rounds_replayed full_state rounds_given_up",
    EvalEvent: "round loss perplexity tokens",
    LeaveEvent: "round reason",
    WarningEvent: "message",
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def strict(text: str) -> dict[str, object]:
    """Parse one line as JSON without Python's NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("kind", CONTRACT, ids=lambda kind: kind.event)
def test_events_have_exactly_the_promised_keys(kind: type[Event]) -> None:
    assert {item.name for item in fields(kind)} == set(CONTRACT[kind].split())


def test_a_missing_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="perplexity"):
        EvalEvent(round=1, loss=2.0, tokens=3)  # type: ignore[call-arg]


def test_every_line_names_event_time_and_peer_and_is_on_disk_at_once(tmp_path: Path) -> None:
    clock = Clock()
    clock.now = 1700000000.5
    with MetricsLog(tmp_path / "metrics.jsonl", "12D3", wall_clock=clock) as log:
        log.write(LeaveEvent(round=3, reason="signal"))
        line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"event": "leave", "time": 1700000000.5, "peer": "12D3", "round": 3, "reason": "signal"}\n'


def test_floats_that_are_not_finite_become_null_and_numpy_values_become_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, "a") as log:
        log.write(
            InnerStepEvent(
                round=np.int64(0),  # type: ignore[arg-type]
                inner_step=1,
                global_inner_step=1,
                loss=math.nan,
                lr=np.float32(0.5),  # type: ignore[arg-type]
                grad_norm=np.float64("inf"),
                tokens_seen=1,
                tokens_per_s=-math.inf,
            )
        )
        log.write(WarningEvent(message="two\nlines \udcff"))
    first, second = map(strict, path.read_text().splitlines())
    assert (first["round"], first["loss"], first["lr"]) == (0, None, 0.5)
    assert first["grad_norm"] is None
    assert first["tokens_per_s"] is None
    assert second["message"] == "two\nlines \udcff"
    assert read_metrics(path) == [first, second]


def test_nested_values_are_plain(tmp_path: Path) -> None:
    class Peer:
        def __str__(self) -> str:
            return "peer-a"

    with MetricsLog(tmp_path / "m", "a") as log:
        log.write(
            JoinEvent(
                round=1,
                lineage="",
                source="swarm",
                donors=(Peer(),),  # type: ignore[arg-type]
                received_bytes=0,
                seconds_s=0.0,
                params_hash="",
            )
        )
    assert read_metrics(tmp_path / "m")[0]["donors"] == ["peer-a"]


def test_reader_leaves_out_a_cut_last_line_but_not_a_broken_one_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"event": "a"}\n{"event": "b"')
    assert read_metrics(path) == [{"event": "a"}]
    path.write_text('{"event": "a"}\n{"event": "b"}')
    assert read_metrics(path) == [{"event": "a"}, {"event": "b"}]
    path.write_text("")
    assert read_metrics(path) == []
    path.write_text('{"event": "a"\n{"event": "b"}\n')
    with pytest.raises(ValueError, match="delimiter"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("tail", "kept"),
    [('{"event": "cut', ["a", "leave"]), ('{"event": "b"}', ["a", "b", "leave"]), ("", ["a", "leave"])],
)
def test_restart_after_a_kill_leaves_only_whole_lines(tmp_path: Path, tail: str, kept: list[str]) -> None:
    path = tmp_path / "m"
    path.write_text('{"event": "a"}\n' + tail)
    with MetricsLog(path, "a") as log:
        log.write(LeaveEvent(round=0, reason="x"))
    assert [strict(line)["event"] for line in path.read_text().splitlines()] == kept


def test_full_disk_costs_events_but_no_exception_no_half_line_and_one_warning_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    log = MetricsLog(tmp_path / "m", "a", clock=clock)
    log.write(LeaveEvent(round=0, reason="before"))
    real = log._file

    class FullDisk:
        closed = False
        seek, truncate, close = real.seek, real.truncate, real.close

        def write(self, data: bytes) -> int:
            return real.write(data[:5])

    monkeypatch.setattr(log, "_file", FullDisk())
    with caplog.at_level("WARNING", "opendiloco"):
        for now in (0.0, 1.0, 59.0, 61.0):
            clock.now = now
            log.write(LeaveEvent(round=1, reason="lost"))
    monkeypatch.undo()
    log.write(LeaveEvent(round=2, reason="after"))
    log.close()
    assert [event["reason"] for event in read_metrics(tmp_path / "m")] == ["before", "after"]
    assert log.lost_events == 4
    assert len(caplog.messages) == 2
    assert os.strerror(errno.ENOSPC) in caplog.messages[0]
    assert "4 events lost" in caplog.messages[1]


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="choose another --out"):
        MetricsLog(tmp_path / "none" / "m", "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="choose another --out"):
        setup_logging(tmp_path / "file" / "log.txt", console=False)


def test_lines_of_several_threads_do_not_mix_and_writing_after_close_is_dropped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m", "a")

    def work(number: int) -> None:
        for step in range(50):
            log.write(LeaveEvent(round=step, reason=str(number) * 100))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    log.write(LeaveEvent(round=0, reason="late"))
    assert len(read_metrics(tmp_path / "m")) == 200


def test_own_lines_go_to_file_and_console_and_libraries_to_the_file_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early = logging.getLogger("hivemind")
    before = list(early.handlers)  # hivemind's own, if another test has imported it
    noisy = logging.StreamHandler(sys.stderr)
    early.addHandler(noisy)
    path = tmp_path / "new" / "log.txt"
    with setup_logging(path, console=True):
        late = logging.getLogger("transformers")
        late.addHandler(noisy)  # as these libraries do when they are imported
        late.propagate = False
        logging.getLogger("hivemind.dht").warning("from hivemind")
        logging.getLogger("transformers.models").warning("from transformers")
        logging.getLogger("somebody.else").warning("from somebody")
        logging.getLogger("opendiloco.trainer").info("round %d", 1)
        logging.getLogger("opendiloco").warning("careful")
        try:
            raise ValueError("inside")
        except ValueError:
            logging.getLogger("opendiloco").exception("went wrong")
    assert capsys.readouterr().err == "round 1\nwarning: careful\nerror: went wrong\n"
    text = path.read_text()
    lines = text.splitlines()
    assert [line.split(" ", 2)[2] for line in lines[:4]] == [
        "hivemind.dht: from hivemind",
        "transformers.models: from transformers",
        "somebody.else: from somebody",
        "opendiloco.trainer: round 1",
    ]
    assert lines[0].split(" ")[0].endswith("Z")
    assert "ValueError: inside" in text
    assert early.handlers == [*before, noisy]
    assert type(early) is logging.Logger
    early.removeHandler(noisy)


def test_without_console_or_file_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with setup_logging(None, console=False):
        logging.getLogger("opendiloco").warning("quiet")
        logging.getLogger("hivemind.dht").error("quiet")
    assert capsys.readouterr() == ("", "")


def test_a_log_on_a_full_disk_prints_no_traceback() -> None:
    code = """
import logging
from pathlib import Path
from opendiloco.metrics import setup_logging
with setup_logging(Path("/dev/full"), console=True):
    logging.getLogger("opendiloco").info("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.stderr == "still here\n"
    assert done.returncode == 0
