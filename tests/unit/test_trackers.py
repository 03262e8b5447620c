"""TensorBoard, Weights & Biases and trackio as sinks.

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
from support import sinking
from support.sinking import ADDRESS, LONG_S, PEER, Recorder, round_event, settings_with, step

from opendiloco.metrics import (
    EvalEvent,
    LeaveEvent,
    WarningEvent,
)
from opendiloco.scalars import point
from opendiloco.sinks import Sinks
from opendiloco.trackers import Wandb, open_sinks, run_info

if TYPE_CHECKING:
    from support.waiting import WaitUntil

release, wait_until = sinking.release, sinking.wait_until  # fixtures


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
