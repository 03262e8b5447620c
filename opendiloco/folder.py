"""A worker's folder: what must not stand in its place, and what an earlier life of the worker has left there."""

from __future__ import annotations

import logging
from pathlib import Path

from opendiloco.card import read_record
from opendiloco.checkpoint import checkpoints
from opendiloco.config import Contract, contract_difference
from opendiloco.errors import SettingsError
from opendiloco.leave import Leave
from opendiloco.settings import load_settings, shown

logger = logging.getLogger(__name__)


def check_folder(out: Path) -> None:
    """Raise SettingsError where a worker's folder holds a file in the place of one of its own folders, or a folder."""
    for name in ("checkpoints", "model", "roundlog"):
        if (out / name).exists() and not (out / name).is_dir():
            raise SettingsError(f"--out {out} holds a file named {name}: move it, or name another folder")
    for name in ("run.toml", "peer.toml", "metrics.jsonl", "log.txt"):
        if (out / name).is_dir():
            raise SettingsError(f"--out {out} holds a folder named {name}: move it, or name another folder")


def check_owner(out: Path, contract: Contract) -> None:
    """Raise SettingsError where a worker's folder holds what another run has left there: this one would replace it."""
    kept = out / "run.toml"
    if not kept.is_file() or not (_has_trained(out) or (out / "model").exists()):
        return
    try:
        theirs = load_settings(kept).contract
    except SettingsError:
        return  # of another version: nothing can be said
    if not (differences := contract_difference(theirs, contract)):
        return
    setting, there, here = differences[0]
    more = f" ({len(differences) - 1} more differ)" if len(differences) > 1 else ""
    raise SettingsError(
        f"--out {out} is the folder of a worker of run {theirs.run.id} with another contract: {setting} is "
        f"{shown(there)} there and {shown(here)} now{more}: name another folder, or go on with what is there with "
        f"--resume latest, without --run, --set {setting} and the --peers of another run"
    )


def _has_trained(out: Path) -> bool:
    return bool(checkpoints(out / "checkpoints")) or any((out / "roundlog").glob("*"))


class EarlierLife:
    """What an earlier life of a worker has left in its folder, before anything of it is replaced."""

    def __init__(self, out: Path) -> None:
        self._out, self._model = out, read_record(out / "model")
        self._has_trained, self._checkpoints = _has_trained(out), checkpoints(out / "checkpoints")
        self._is_told = False

    def begin_anew(self, contract: Contract, resume: str | None) -> None:
        """The run is about to start at round 0 here: say so the first time, unless that would cost what is left.

        Args:
            resume: what --resume asked for, without finding a checkpoint. `latest` is no mistake where there is nothing
                to resume: a service gives it at its first start too.

        Raises:
            Leave: --resume, and the run is over.
            SettingsError: --resume, and the model that training has come to would be replaced.
        """
        if resume is not None and self._model is not None and self._model.contract == contract.digest:
            self._keep_model(self._model.position.round, contract, resume)
        if self._is_told:
            return
        self._is_told = True
        if self._has_trained:
            self._warn(resume)
        elif resume is not None:
            logger.info("--resume %s: %s holds no checkpoint yet, this worker starts at round 0", resume, self._out)

    def _keep_model(self, round: int, contract: Contract, resume: str) -> None:
        folder = self._out / "model"
        if round >= contract.run.rounds:
            logger.info(
                "run %s is over: the model after its %d rounds is in %s (without --resume it is trained anew)",
                contract.run.id,
                round,
                folder,
            )
            raise Leave
        raise SettingsError(
            f"--resume {resume}: {self._out} holds no checkpoint, and starting at round 0 would replace the model of "
            f"round {round} in {folder}: --peers ADDRESS goes back to workers that go on with the run, without "
            "--resume it begins anew"
        )

    def _warn(self, resume: str | None) -> None:
        """Hardly ever what a user wants."""
        found = self._checkpoints
        newest = f" (newest checkpoint: {found[-1].name})" if found else ""
        cure = (
            "--resume latest to a checkpoint"
            if found or resume is None
            else f"--resume {resume} finds a checkpoint where checkpoint.every_rounds is above 0"
        )
        logger.warning(
            "%s was a worker's folder before%s, and the run starts from the beginning all the same: --peers ADDRESS "
            "goes back to workers that go on with it, %s",
            self._out,
            newest,
            cure,
        )
