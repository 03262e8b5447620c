"""Metric sinks get every event under stable names, and whatever they do, they never stop or slow training."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import sinking
from support.sinking import JOIN, LONG_S, PEER, Clock, Hanging, Recorder, round_event, settings_with, step

from opendiloco.errors import SettingsError, pip_install
from opendiloco.metrics import (
    CatchUpEvent,
    EvalEvent,
    Event,
    LeaveEvent,
    MetricsLog,
    WarningEvent,
    read_metrics,
)
from opendiloco.scalars import Point, point
from opendiloco.settings import load_settings
from opendiloco.sinks import QUEUE_EVENTS, Sinks
from opendiloco.trackers import check_sinks

if TYPE_CHECKING:
    from support.waiting import WaitUntil

release, wait_until = sinking.release, sinking.wait_until  # fixtures


# --- what a sink gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "at", "scalars", "texts"),
    [
        (
            step(60),
            60,
            {
                "inner/loss": 2.0,
                "inner/lr": 1e-3,
                "inner/grad_norm": 0.5,
                "inner/tokens_seen": 100.0,
                "inner/tokens_per_s": 10.0,
            },
            {},
        ),
        (
            round_event(),
            100,
            {
                "round/number": 2.0,
                "round/committed": 1.0,
                "round/participants": 2.0,
                "round/loss": 3.0,
                "round/inner_steps": 50.0,
                "round/tokens": 400.0,
                "round/swarm_tokens": 800.0,
                "round/inner_s": 1.0,
                "round/wait_s": 0.5,
                "round/rendezvous_s": 0.25,
                "round/allreduce_s": 0.125,
                "round/outer_s": 0.0625,
                "round/sent_bytes": 10.0,
                "round/received_bytes": 20.0,
                "round/pseudo_gradient_norm": 0.75,
                "round/outer_gradient_norm": 0.25,
            },
            {},
        ),
        (
            EvalEvent(round=2, loss=2.0, perplexity=7.5, tokens=9),
            100,
            {"validation/loss": 2.0, "validation/perplexity": 7.5},
            {},
        ),
        (
            JOIN,
            100,
            {"join/received_bytes": 7.0, "join/seconds_s": 1.5},
            {"events/join": "joined at round 2 (swarm, 1 donors)"},
        ),
        (
            CatchUpEvent(
                round=2,
                lineage="ab",
                donors=["a", "b"],
                received_bytes=7,
                seconds_s=1.5,
                rounds_replayed=3,
                full_state=False,
                rounds_given_up=1,
            ),
            100,
            {
                "catch_up/received_bytes": 7.0,
                "catch_up/seconds_s": 1.5,
                "catch_up/rounds_replayed": 3.0,
                "catch_up/rounds_given_up": 1.0,
            },
            {"events/catch_up": "caught up to round 2 (3 rounds, 2 donors)"},
        ),
        (LeaveEvent(round=2, reason="finished"), 123, {}, {"events/leave": "left at round 2: finished"}),
        (WarningEvent(message="two\nlines"), 123, {}, {"events/warning": "two lines"}),
    ],
    ids=lambda value: value.event if isinstance(value, Event) else "",
)
def test_numbers_have_stable_names_and_stand_at_the_global_inner_step(
    event: Event, at: int, scalars: dict[str, float], texts: dict[str, str]
) -> None:
    found = point(event, time_s=5.0, inner_steps=50, last_step=123)
    assert found == Point(step=at, time_s=5.0, scalars=scalars, texts=texts)


def test_what_is_missing_or_not_finite_is_no_number_and_a_round_without_commit_says_so() -> None:
    missing = point(round_event("retry", None), time_s=0.0, inner_steps=50, last_step=0)
    assert "round/outer_gradient_norm" not in missing.scalars
    assert missing.scalars["round/committed"] == 0.0
    assert missing.texts == {"events/round": "round 2: retry"}
    for loss in (float("nan"), float("inf")):
        assert "inner/loss" not in point(step(0, loss), time_s=0.0, inner_steps=50, last_step=0).scalars


def test_sinks_get_every_event_in_the_order_and_with_the_times_of_the_lines(
    tmp_path: Path, release: threading.Event
) -> None:
    first, second = Recorder(), Recorder()
    with MetricsLog(tmp_path / "m", PEER) as log:
        with Sinks({"first": first, "second": second}, inner_steps=50) as sinks:
            log.forward(sinks.take)

            def work(number: int) -> None:
                for index in range(100):
                    log.write(step(1000 * number + index))

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            log.write(WarningEvent(message="last"))
            sinks.close(LONG_S)
        log.write(step(1))  # after the sinks are closed: only in the file
    lines = read_metrics(tmp_path / "m")
    assert len(lines) == 302
    expected = [(line["time"], line["global_inner_step"]) for line in lines[:300]]
    for sink in (first, second):
        assert sink.calls == ["open", "close"]
        assert [(point.time_s, point.step) for point in sink.points[:-1]] == expected
        assert sink.points[-1].step == 2099  # an event without a step stands at the last one there was


# --- sinks that misbehave --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["start", "write", "close"])
def test_a_sink_that_hangs_never_delays_a_write_or_another_sink_and_is_left_behind(
    tmp_path: Path, release: threading.Event, caplog: pytest.LogCaptureFixture, wait_until: WaitUntil, where: str
) -> None:
    """It hangs until all is over: whatever waited for it would wait for ever."""
    clock, hanging, healthy = Clock(), Hanging(where, release), Recorder()
    sinks = Sinks({"bad": hanging, "good": healthy}, inner_steps=50, clock=clock)
    with caplog.at_level("WARNING"), MetricsLog(tmp_path / "m", PEER) as log:
        log.forward(sinks.take)
        if where == "start":
            assert hanging.hangs.wait(LONG_S)
        log.write(step(0))
        if where == "write":
            assert hanging.hangs.wait(LONG_S)
        for now in (1, 31, 32, 90, 92):
            wait_until(lambda: sinks._feeds[1]._call is None, "the other sink has done its work before time goes on")
            clock.now = 0 if where == "close" else now
            log.write(step(now))
        wait_until(lambda: len(healthy.points) == 6, "the other sink has everything")
        sinks.close(0.5)
        log.write(step(100))
    assert len(read_metrics(tmp_path / "m")) == 7
    assert healthy.calls == ["open", "close"]
    tail = "events lost so far, training goes on (metrics.jsonl has all of them)"
    if where == "close":
        end = "sink bad: close was not done when the worker ended: 0 events lost so far (metrics.jsonl has all of them)"
        assert caplog.messages == [end]
    else:
        assert caplog.messages == [f"sink bad: {where} takes {s} s so far: 0 {tail}" for s in (31, 92)]
    caplog.clear()
    release.set()
    wait_until(lambda: hanging.calls[-1:] == ["close"], "it comes back, and is closed")
    assert not caplog.messages


def test_a_full_queue_drops_and_counts_what_comes_later(
    release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    clock, sink = Clock(), Hanging("write", release)
    sinks = Sinks({"slow": sink}, inner_steps=50, clock=clock)
    with caplog.at_level("WARNING"):
        sinks.take(step(0), 0.0)
        assert sink.hangs.wait(LONG_S)
        for number in range(1, QUEUE_EVENTS + 3):  # two too many
            sinks.take(step(number), 0.0)
        clock.now = 61.0
        sinks.take(step(0), 0.0)
        release.set()
        sinks.close(LONG_S)
    assert [point.step for point in sink.points] == list(range(QUEUE_EVENTS + 1))
    tail = "events lost so far, training goes on (metrics.jsonl has all of them)"
    assert caplog.messages == [
        f"sink slow: {QUEUE_EVENTS} events wait already: 1 {tail}",
        f"sink slow: write takes 61 s so far: 3 {tail}",
    ]


@pytest.mark.parametrize(
    "error", [OSError("no\nroute"), SystemExit("no route")], ids=lambda error: type(error).__name__
)
def test_a_sink_that_always_raises_costs_its_events_and_one_warning_a_minute(
    release: threading.Event, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    clock, times = Clock(), iter([0.0, 1.0, 59.0, 61.0])

    class Raising(Recorder):
        def open(self) -> str:  # before time goes on, all events are there
            assert release.wait(LONG_S)
            return super().open()

        def write(self, point: Point) -> None:
            clock.now = next(times)
            raise error

    sinks = Sinks({"bad": Raising()}, inner_steps=50, clock=clock)
    with caplog.at_level("WARNING"):
        for number in range(4):
            sinks.take(step(number), 0.0)
        release.set()
        sinks.close(LONG_S)
    assert caplog.messages == [
        f"sink bad: write: {type(error).__name__}: no route: {lost} events lost so far, training goes on "
        "(metrics.jsonl has all of them)"
        for lost in (1, 4)
    ]


def test_a_sink_that_does_not_start_is_started_again_and_then_gets_what_has_waited(release: threading.Event) -> None:
    started = threading.Event()

    class Late(Recorder):
        def open(self) -> str:
            super().open()
            if len(self.calls) < 3:
                raise OSError("no answer")
            started.set()
            return "there"

    sink = Late()
    sinks = Sinks({"late": sink}, inner_steps=50, retry_s=0.001)
    sinks.take(step(7), 0.0)
    assert started.wait(LONG_S)
    sinks.close(LONG_S)
    assert sink.calls == ["open", "open", "open", "close"]
    assert [point.step for point in sink.points] == [7]


def test_a_sink_that_never_started_is_not_waited_for_and_its_events_are_counted(
    release: threading.Event, caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    clock = Clock()

    class Dead(Recorder):
        def open(self) -> str:
            raise OSError("no answer")

    with caplog.at_level("WARNING"):
        sinks = Sinks({"dead": Dead()}, inner_steps=50, clock=clock, retry_s=3600.0)
        sinks.take(step(0), 0.0)
        wait_until(lambda: caplog.messages, "the first start has failed")
        clock.now = 61.0
        sinks.close(LONG_S)  # comes back at once: its pause is longer than this test may take
    assert "sink dead: start: OSError: no answer" in caplog.messages[0]
    assert "sink dead: it was not started when the worker ended: 1 events lost" in caplog.messages[1]


# --- settings --------------------------------------------------------------------------------------------


def test_jsonl_needs_no_name_and_others_are_refused() -> None:
    assert load_settings().peer.log.sinks == ("jsonl",)
    assert settings_with("jsonl", "wandb").peer.log.sinks == ("jsonl", "wandb")
    check_sinks(["jsonl", "tensorboard"])
    check_sinks([])
    with pytest.raises(SettingsError, match="each one of jsonl, tensorboard, wandb, trackio"):
        settings_with("csv")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_named_with_its_cure_before_anything_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A folder of the package's name, as wandb makes one for its output, is no package."""
    from opendiloco.trainer import run_worker

    (tmp_path / "path" / name).mkdir(parents=True)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path")])
    settings = settings_with("jsonl", name)
    with pytest.raises(SettingsError) as caught:
        run_worker(settings, tmp_path / "out", run_id=None, resume=None, address_file=None)
    monkeypatch.undo()
    assert str(caught.value) == (
        f'log.sinks is ["jsonl", "{name}"] and the package {name} is not installed: '
        f"{pip_install(name)}, or leave {name} out"
    )
    assert caught.value.exit_code == 64
    assert not (tmp_path / "out").exists()
