"""`opendiloco eval --tasks`: the harness is called as it wants to be, and its absence is one line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from opendiloco.config import ComputeConfig
from opendiloco.errors import OpendilocoError, SettingsError, pip_install
from opendiloco.harness import result_lines, run_tasks

COMPUTE = ComputeConfig(device="cpu")
RESULTS = {
    "mine": {
        "alias": "mine",
        "acc,none": 0.25,
        "acc_stderr,none": 0.0433,
        "acc_norm,none": 1,
        "acc_norm_stderr,none": "N/A",
    },
    "sums": {"alias": "sums", "exact_match,strict-match": 0.5},
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for lm_eval that knows two tasks and keeps the arguments of its calls."""
    package, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    stand_in: Any = package
    stand_in.calls, stand_in.error = [], None

    class TaskManager:
        def __init__(self, *, include_path: str | None) -> None:
            self.include_path = include_path

        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name in RESULTS]

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        stand_in.calls.append(arguments)
        if stand_in.error is not None:
            raise stand_in.error
        return {"results": {name: RESULTS[name] for name in arguments["tasks"]}}

    stand_in.simple_evaluate, stand_in.tasks = simple_evaluate, tasks
    tasks.TaskManager = TaskManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    return package


def test_results_are_one_line_per_task_and_metric(
    model_dir: Path, harness: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = ComputeConfig(device="cpu", precision="bf16")
    assert run_tasks(model_dir, "mine, sums,", task_dir=tmp_path, compute=compute) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine | acc 0.2500 ± 0.0433",
        "mine | acc_norm 1.0000",
        "sums | exact_match (strict-match) 0.5000",
    ]
    (call,) = harness.calls
    assert (call["model"], call["tasks"], call["device"]) == ("hf", ["mine", "sums"], "cpu")
    assert call["model_args"] == {"pretrained": str(model_dir), "dtype": "bfloat16"}
    assert call["task_manager"].include_path == str(tmp_path)


def test_results_without_metrics_are_no_lines() -> None:
    assert list(result_lines({"group": {"alias": "group", " ": " "}})) == []


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SettingsError) as caught:
        run_tasks(model_dir, "mine", task_dir=None, compute=COMPUTE)
    assert str(caught.value) == f"--tasks needs the package lm_eval: {pip_install('lm-eval[hf]')}"


def test_what_cannot_be_evaluated_is_one_line(model_dir: Path, harness: Any, tmp_path: Path) -> None:
    for folder, tasks, task_dir, line in (
        (model_dir, " ,", None, "name tasks, for example --tasks hellaswag,arc_easy"),
        (model_dir, "mine,none", None, "--tasks none: the harness has no such task"),
        (model_dir, "mine", tmp_path / "nowhere", "--task-dir is .*nowhere, but there is no such folder"),
        (tmp_path, "mine", None, "holds no model"),
    ):
        with pytest.raises(SettingsError, match=line):
            run_tasks(folder, tasks, task_dir=task_dir, compute=COMPUTE)
    assert harness.calls == []


def test_data_that_cannot_be_had_are_one_line(model_dir: Path, harness: Any) -> None:
    harness.error = ConnectionError("no way\nto the hub")
    with pytest.raises(
        OpendilocoError, match=r"^--tasks mine failed in the harness \(ConnectionError: no way\): .*check"
    ):
        run_tasks(model_dir, "mine", task_dir=None, compute=COMPUTE)
