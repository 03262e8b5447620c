"""Metric sinks get every event under stable names, and whatever they do, they never stop or slow training.

TensorBoard is the real one. Weights & Biases and trackio are too large for this suite: small modules stand in for them,
which imitate what the real ones (wandb 0.31, trackio 0.43) were seen to do: print, refuse a run id after a start that
failed, not come back from a start without an answer, and wait for the network when the interpreter ends.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import waiting

from opendiloco.errors import SettingsError
from opendiloco.metrics import (
    EvalEvent,
    Event,
    InnerStepEvent,
    JoinEvent,
    LeaveEvent,
    MetricsLog,
    RoundEvent,
    WarningEvent,
    read_metrics,
)
from opendiloco.scalars import Point, point
from opendiloco.settings import Settings, load_settings
from opendiloco.sinks import QUEUE_EVENTS, Sinks
from opendiloco.trackers import Wandb, check_sinks, open_sinks, run_info

if TYPE_CHECKING:
    from support.waiting import WaitUntil

PEER = "12D3KooWabcdefgh"
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"
wait_until = waiting.wait_until  # the fixture
LONG_S = 60.0  # to finish in, where that is not the claim


def step(number: int, loss: float = 2.0) -> InnerStepEvent:
    return InnerStepEvent(
        round=number // 50,
        inner_step=number % 50 + 1,
        global_inner_step=number,
        loss=loss,
        lr=1e-3,
        grad_norm=0.5,
        tokens_seen=100,
        tokens_per_s=10.0,
    )


def round_event(verdict: str = "commit", outer_gradient_norm: float | None = 0.25) -> RoundEvent:
    return RoundEvent(
        round=2,
        verdict=verdict,  # type: ignore[arg-type]
        participants=["a", "b"],
        weights={"a": 1.0, "b": 1.0},
        lineage="l",
        params_hash="h",
        loss=3.0,
        inner_steps=50,
        tokens=400,
        shards=[1, 2],
        swarm_tokens=800,
        inner_s=1.0,
        wait_s=0.5,
        rendezvous_s=0.25,
        allreduce_s=0.125,
        outer_s=0.0625,
        sent_bytes=10,
        received_bytes=20,
        codec="int8",
        pseudo_gradient_norm=0.75,
        outer_gradient_norm=outer_gradient_norm,
    )


JOIN = JoinEvent(
    round=2, lineage="", source="swarm", donors=["x"], received_bytes=7, seconds_s=1.5, params_hash="h"
)  # fmt: skip


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.calls: list[str] = []

    def open(self) -> str:
        self.calls.append("open")
        return "in memory"

    def write(self, point: Point) -> None:
        self.points.append(point)

    def close(self) -> None:
        self.calls.append("close")


class Hanging(Recorder):
    """A sink that does not come back from one of its calls until it is released."""

    def __init__(self, where: str, release: threading.Event) -> None:
        super().__init__()
        self.where, self.hangs, self._release = where, threading.Event(), release

    def _call(self, what: str) -> None:
        if what == self.where:
            self.hangs.set()
            assert self._release.wait(120)

    def open(self) -> str:
        self._call("start")
        return super().open()

    def write(self, point: Point) -> None:
        self._call("write")
        super().write(point)

    def close(self) -> None:
        self._call("close")
        super().close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def release(wait_until: WaitUntil) -> Iterator[threading.Event]:
    """Lets hanging sinks go, at the end at the latest; then every thread of a sink ends."""
    before, event = set(threading.enumerate()), threading.Event()
    yield event
    event.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads of sinks end")


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


def settings_with(*names: str, sets: tuple[str, ...] = ()) -> Settings:
    chosen = ", ".join(f'"{name}"' for name in names)
    return load_settings(None, None, [f"log.sinks=[{chosen}]", *sets])


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
        f"pip install {name}, or leave {name} out"
    )
    assert caught.value.exit_code == 64
    assert not (tmp_path / "out").exists()


# --- TensorBoard -----------------------------------------------------------------------------------------


def test_tensorboard_files_hold_numbers_texts_and_settings_without_addresses(
    tmp_path: Path, release: threading.Event
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = settings_with(
        "tensorboard", sets=(f'swarm.peers=["{ADDRESS}"]', "swarm.identity=/my/secret.key", "inner.lr=0.125")
    )
    before = set(threading.enumerate())
    for events in (
        [step(0, 3.0), step(10, 2.5)],
        [step(20, 2.0), round_event("retry"), LeaveEvent(round=2, reason="x")],
    ):
        sinks = open_sinks(settings, tmp_path, PEER)  # the second time: the worker was started again
        for event in events:
            sinks.take(event, 1000.0 + len(events))
        sinks.close(LONG_S)
    assert set(threading.enumerate()) <= before
    folder = tmp_path / "tensorboard"
    found = EventAccumulator(str(folder)).Reload()
    losses = [(item.step, item.value, item.wall_time) for item in found.Scalars("inner/loss")]
    assert losses == [(0, 3.0, 1002.0), (10, 2.5, 1002.0), (20, 2.0, 1003.0)]
    assert [(item.step, item.value) for item in found.Scalars("round/allreduce_s")] == [(100, 0.125)]
    (leave,) = found.Tensors("events/leave/text_summary")
    assert (leave.step, leave.tensor_proto.string_val) == (100, [b"left at round 2: x"])
    data = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"inner.lr" in data
    assert b"compute.precision" in data
    assert b"203.0.113.5" not in data
    assert b"secret" not in data


# --- Weights & Biases and trackio ------------------------------------------------------------------------

WANDB = """
    calls, busy, failures = [], set(), []

    def Settings(**given): return ("settings", given)
    def setup(settings): calls.append(("setup", settings))

    def teardown(exit_code):
        calls.append(("teardown",))
        busy.clear()

    def init(**given):
        if given["id"] in busy:
            raise RuntimeError("run ID is in use")
        busy.add(given["id"])
        if failures:
            raise failures.pop()
        calls.append(("init", given))
        return Run()

    class Run:
        url = "https://example.test/run"
        def define_metric(self, name, *, step_metric): calls.append(("define_metric", name, step_metric))
        def log(self, row): calls.append(("log", row))
        def finish(self): calls.append(("finish",))
"""
TRACKIO = """
    import builtins, types
    calls = []
    run, utils, deploy = types.SimpleNamespace(), types.SimpleNamespace(), types.SimpleNamespace()

    def init(**given):
        print("* Trackio project initialized")
        run.print("* from inside")
        calls.append(("init", given))
        return Run()

    class Run:
        def log(self, row, *, step): calls.append(("log", row, step))
        def finish(self):
            print("* Run finished")
            calls.append(("finish",))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], object]]:
    """Puts a module on the path and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "modules").mkdir()
    names: list[str] = []

    def put(name: str, source: str) -> object:
        (tmp_path / "modules" / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.delitem(sys.modules, name, raising=False)
        names.append(name)
        return __import__(name)

    yield put
    for name in names:
        sys.modules.pop(name, None)


def test_wandb_run_is_quiet_named_after_run_and_peer_and_survives_a_start_that_failed(
    tmp_path: Path,
    release: threading.Event,
    stand_in: Callable[[str, str], object],
    wait_until: WaitUntil,
) -> None:
    wandb: object = stand_in("wandb", WANDB)
    calls: list[tuple[object, ...]] = wandb.calls  # type: ignore[attr-defined]
    wandb.failures.append(OSError("no answer"))  # type: ignore[attr-defined]
    settings = settings_with("wandb", sets=(f'swarm.peers=["{ADDRESS}"]', "run.id=mine", "log.project=p"))
    sinks = Sinks({"wandb": Wandb(run_info(settings, tmp_path, PEER))}, inner_steps=50, retry_s=0.001)
    sinks.take(step(10, 2.5), 0.0)
    sinks.take(WarningEvent(message="careful"), 0.0)
    wait_until(lambda: len(calls) > 7, "it has started and got both")
    sinks.close(LONG_S)
    quiet = ("settings", {"silent": True, "console": "off", "disable_git": True, "disable_code": True})
    assert calls[:4] == [("teardown",), ("setup", quiet)] * 2
    (_, given), *rest = calls[4:]
    assert isinstance(given, dict)
    config = given.pop("config")
    digest = settings.contract.digest[:8]
    assert given == {
        "project": "p",
        "group": "mine",
        "name": "mine-abcdefgh",
        "id": f"mine-{digest}-abcdefgh",
        "resume": "allow",
        "dir": str(tmp_path),
        "settings": quiet,
    }
    assert (config["inner"]["steps"], config["compute"]["precision"]) == (50, "fp32")
    assert not {"peers", "host_maddrs", "announce_maddrs", "identity"} & set(config["swarm"])
    assert rest[0] == ("define_metric", "*", "global_inner_step")
    assert rest[1:] == [
        ("log", {**point(step(10, 2.5), time_s=0.0, inner_steps=50, last_step=0).scalars, "global_inner_step": 10}),
        ("log", {"events/warning": "careful", "global_inner_step": 10}),
        ("finish",),
    ]


def test_trackio_run_prints_nothing_and_gets_steps(
    tmp_path: Path,
    release: threading.Event,
    stand_in: Callable[[str, str], object],
    capfd: pytest.CaptureFixture[str],
) -> None:
    trackio = stand_in("trackio", TRACKIO)
    sinks = open_sinks(settings_with("trackio"), tmp_path, PEER)
    sinks.take(EvalEvent(round=1, loss=2.0, perplexity=7.5, tokens=9), 0.0)
    sinks.close(LONG_S)
    (_, given), *rest = trackio.calls  # type: ignore[attr-defined]
    config = given.pop("config")
    assert given == {
        "project": "opendiloco",
        "group": "demo",
        "name": "demo-abcdefgh",
        "resume": "allow",
        "embed": False,
    }
    assert config["run"]["id"] == "demo"
    assert rest == [("log", {"validation/loss": 2.0, "validation/perplexity": 7.5}, 50), ("finish",)]
    assert capfd.readouterr().out == ""


def test_a_command_ends_although_a_sink_hangs_holds_threads_and_hooks_the_end_of_the_interpreter(
    tmp_path: Path,
) -> None:
    """Ends before the limit of the subprocess, or never."""
    (tmp_path / "wandb.py").write_text(
        textwrap.dedent("""
            import atexit, threading

            def Settings(**_): return None
            def setup(_): pass
            def teardown(exit_code): pass

            def init(**_):
                for_ever = threading.Event()
                atexit.register(for_ever.wait)
                threading.Thread(target=for_ever.wait).start()
                print("hangs", flush=True)
                for_ever.wait()
        """)
    )
    code = textwrap.dedent(f"""
        import logging, pathlib, sys, time
        import opendiloco.__main__ as command
        from opendiloco.settings import load_settings
        from opendiloco.trackers import open_sinks

        def work():
            with open_sinks(load_settings(None, None, ['log.sinks=["wandb"]']), pathlib.Path("."), "{PEER}"):
                while "wandb" not in sys.modules or not hasattr(sys.modules["wandb"], "init"):
                    time.sleep(0.01)
            return 3

        logging.basicConfig(format="%(message)s")
        command.main = work
        command.run()
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (3, "hangs\n")
    assert done.stderr.startswith("sink wandb: start was not done when the worker ended: 0 events lost so far")


def test_the_console_hears_where_a_sink_writes(release: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Sinks({"memory": Recorder()}, inner_steps=50).close(LONG_S)
    assert caplog.messages == ["sink memory: in memory"]
