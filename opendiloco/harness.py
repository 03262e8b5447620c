"""EleutherAI's lm-eval harness on a model folder: `opendiloco eval MODEL_DIR --tasks ...`. An optional package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opendiloco.compute import choose_device
from opendiloco.config import ComputeConfig
from opendiloco.errors import OpendilocoError, SettingsError, pip_install

BATCH_SIZE = 8


def run_tasks(model_dir: Path, tasks: str, *, task_dir: Path | None, compute: ComputeConfig) -> int:
    """Print the results of some tasks (names with commas between them), one line per task and metric.

    Args:
        task_dir: folder with task files (YAML) of one's own, besides those of the harness.

    Raises:
        SettingsError: the package is not installed, there is no such model or task.
        OpendilocoError: a task's data cannot be had, or do not fit the task.
    """
    names = [name for part in tasks.split(",") if (name := part.strip())]
    if not names:
        raise SettingsError(f"--tasks is {tasks!r}: name tasks, for example --tasks hellaswag,arc_easy")
    if task_dir is not None and not task_dir.is_dir():
        raise SettingsError(f"--task-dir is {task_dir}, but there is no such folder: correct the path")
    if not (model_dir / "config.json").is_file():
        raise SettingsError(f"{model_dir} holds no model (config.json): name one that training or export wrote")
    try:
        results = _evaluate(model_dir, names, task_dir=task_dir, compute=compute)
    except ImportError as error:
        cure = pip_install("lm-eval[hf]")
        raise SettingsError(f"--tasks needs the package {error.name or 'lm_eval'}: {cure}") from None
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise OpendilocoError(
            f"--tasks {','.join(names)} failed in the harness ({type(error).__name__}: {reason}): their data come from "
            "the hub, check the network or name tasks with data of your own (--task-dir)"
        ) from error
    for line in result_lines(results):
        print(line)
    return 0


def result_lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """`task | metric value`, with the standard error where there is one.

    Args:
        results: of the harness: task -> "metric,filter" -> value, standard errors under "metric_stderr,filter".
    """
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filter_ = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{filter_}")
            spread = f" ± {error:.4f}" if isinstance(error, (int, float)) else ""
            yield f"{task} | {metric}{'' if filter_ == 'none' else f' ({filter_})'} {value:.4f}{spread}"


def _evaluate(
    model_dir: Path, names: Sequence[str], *, task_dir: Path | None, compute: ComputeConfig
) -> Mapping[str, Mapping[str, Any]]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_dir) if task_dir is not None else None)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise SettingsError(f"--tasks {unknown[0]}: the harness has no such task: `lm-eval ls tasks` lists them")
    dtype = "bfloat16" if compute.precision == "bf16" else "float32"
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model_dir), "dtype": dtype},
        tasks=list(names),
        task_manager=manager,
        batch_size=BATCH_SIZE,
        device=str(choose_device(compute)),
        log_samples=False,
    )
    results: Mapping[str, Mapping[str, Any]] = found["results"] if found is not None else {}
    return results
