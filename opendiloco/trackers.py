"""TensorBoard, Weights & Biases and trackio as metric sinks; their packages are imported in the sinks' threads."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendiloco.errors import SettingsError, pip_install
from opendiloco.scalars import Point
from opendiloco.settings import Settings
from opendiloco.sinks import Sink, Sinks

FLUSH_S = 10
"""TensorBoard's files are at most so far behind."""
STEP_AXIS = "global_inner_step"
"""What W&B draws curves over. Its own step only grows, but a round is reported when later steps may have been."""
PRIVATE = {"peers", "host_maddrs", "announce_maddrs", "identity"}
"""Settings of section swarm that no sink gets."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a run is called at a sink, and what it was started with."""

    project: str
    group: str
    """Of all workers of the run."""
    name: str
    id: str
    """The same for the same peer in the same run: a worker that is started again goes on with its curves."""
    folder: Path
    config: Mapping[str, Mapping[str, object]]
    """Section -> setting -> value."""


def check_sinks(names: Sequence[str]) -> None:
    """Raise SettingsError for the first of log.sinks whose package is not installed."""
    for name in names:
        if name in _TRACKERS and not _is_installed(name):
            raise SettingsError(
                f"log.sinks is {json.dumps(list(names))} and the package {name} is not installed: "
                f"{pip_install(name)}, or leave {name} out"
            )


def open_sinks(settings: Settings, folder: Path, peer_id: str) -> Sinks:
    """The sinks that the settings ask for, besides metrics.jsonl; each starts in its own thread."""
    info = run_info(settings, folder, peer_id)
    trackers: dict[str, Sink] = {name: _TRACKERS[name](info) for name in settings.peer.log.sinks if name in _TRACKERS}
    return Sinks(trackers, inner_steps=settings.contract.inner.steps)


def run_info(settings: Settings, folder: Path, peer_id: str) -> RunInfo:
    """Names of a worker's run, and its settings without addresses and keys."""
    contract, peer = settings.contract, settings.peer
    own = peer.model_dump(mode="json", exclude={"swarm": PRIVATE})
    short_id = peer_id[-8:]
    return RunInfo(
        project=peer.log.project,
        group=contract.run.id,
        name=f"{contract.run.id}-{short_id}",
        id=f"{contract.run.id}-{contract.digest[:8]}-{short_id}",
        folder=folder,
        config=contract.model_dump(mode="json") | own,
    )


class TensorBoard:
    """Event files in OUT/tensorboard."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._writer: Any = None

    def open(self) -> str:
        """Open an event file and write the settings as hyperparameters."""
        from torch.utils.tensorboard import summary
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = self._info.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_S)
        outcomes = dict.fromkeys(("validation/loss", "round/loss"), 0.0)  # columns of the table, their values are read
        for part in summary.hparams(_flat(self._info.config), outcomes):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(part)
        return f"files in {folder} (look with: tensorboard --logdir {folder})"

    def write(self, point: Point) -> None:
        """Numbers as scalars, lines as text."""
        for name, value in point.scalars.items():
            self._writer.add_scalar(name, value, point.step, point.time_s)
        for name, text in point.texts.items():
            self._writer.add_text(name, text, point.step, point.time_s)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Wandb:
    """A run at Weights & Biases, or in OUT/wandb with WANDB_MODE=offline; WANDB_... variables say where and as whom."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._run: Any = None

    def open(self) -> str:
        """Start wandb's process and open the run; raises after about 90 s without an answer."""
        import wandb

        info = self._info
        # Silent: nothing on the worker's console, and above all no question for an API key on its terminal.
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        wandb.teardown(exit_code=1)  # of a start that failed: its process would say that the run is in use
        wandb.setup(settings)
        self._run = wandb.init(
            project=info.project,
            group=info.group,
            name=info.name,
            id=info.id,
            resume="allow",
            dir=str(info.folder),
            config=info.config,
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP_AXIS)
        return self._run.url or f"offline (send it with: wandb sync {Path(self._run.dir).parent})"

    def write(self, point: Point) -> None:
        """One row of the run's history."""
        self._run.log({**point.scalars, **point.texts, STEP_AXIS: point.step})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class Trackio:
    """A run of trackio, in its own folder (TRACKIO_DIR) or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._run: Any = None

    def open(self) -> str:
        """Open the run."""
        import trackio

        for module in (trackio, trackio.run, trackio.utils, trackio.deploy):
            module.print = _to_log  # they print, but the console is the worker's
        info = self._info
        self._run = trackio.init(
            project=info.project, group=info.group, name=info.name, resume="allow", config=info.config, embed=False
        )
        return f"run {info.name} (look with: trackio show --project {info.project})"

    def write(self, point: Point) -> None:
        """One row of the run's metrics."""
        self._run.log({**point.scalars, **point.texts}, step=point.step)

    def close(self) -> None:
        """Wait until everything is stored."""
        self._run.finish()


_TRACKERS: dict[str, Callable[[RunInfo], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def _is_installed(package: str) -> bool:
    """Whether there is such a package; a folder of that name in the path, such as wandb's output, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _flat(config: Mapping[str, Mapping[str, object]]) -> dict[str, bool | int | float | str]:
    """section.setting -> value; lists as text."""
    return {
        f"{section}.{key}": value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for section, values in config.items()
        for key, value in values.items()
    }


def _to_log(*values: object, **_: object) -> None:
    logging.getLogger("trackio").info(" ".join(map(str, values)))
