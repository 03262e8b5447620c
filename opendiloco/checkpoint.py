"""One worker's state on disk, complete or absent: outer state, inner optimizer, data position, random state.

A checkpoint is written beside its final name and renamed, by a thread that works on copies; training goes on
meanwhile. One with values that are not finite is never written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opendiloco.errors import SettingsError
from opendiloco.ledger import Ledger
from opendiloco.rounds import Position

_META, _OUTER, _INNER = "meta.json", "outer.safetensors", "inner.pt"
_POSITION = ("round", "lineage", "params_hash", "tokens")
FORMAT = 3
_NAME = re.compile(r"round-\d+", re.ASCII)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What a worker needs to go on as if nothing had happened. Tensors are copies on the host."""

    contract: str
    """Digest of the run contract."""
    position: Position
    outer: dict[str, Tensor]
    """theta, momentum and, with outer adam, second_moment: fp32 [N]."""
    inner: dict[str, Any]
    """State of the inner optimizer."""
    data: dict[str, Any]
    """Position in the data (JSON values)."""
    random: Tensor
    """State of torch's CPU random generator."""


class CheckpointWriter:
    """Writes checkpoints to a folder, one at a time, and keeps the newest ones."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        for leftover in folder.glob(".round-*"):  # of a worker that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)

    def write(self, checkpoint: Checkpoint) -> None:
        """Begin to write; waits for the one before. A disk that is full costs this checkpoint, not the run."""
        self.wait()
        self._writing = self._thread.submit(self._write, checkpoint)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Finish writing and stop the thread."""
        self._thread.shutdown()

    def _write(self, checkpoint: Checkpoint) -> None:
        position = checkpoint.position
        if not all(bool(torch.isfinite(tensor).all()) for tensor in checkpoint.outer.values()):
            logger.warning("round %d is not checkpointed: its state is not finite", position.round)
            return
        final = self._folder / f"round-{position.round:06d}"
        beside = self._folder / f".{final.name}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            save_file(checkpoint.outer, beside / _OUTER)
            torch.save({"inner": checkpoint.inner, "random": checkpoint.random}, beside / _INNER)
            meta = {
                "format": FORMAT,
                "files": {name: _digest(beside / name) for name in (_OUTER, _INNER)},
                "contract": checkpoint.contract,
                "position": {name: getattr(position, name) for name in _POSITION},
                "ledger": position.ledger.model_dump(mode="json"),
                "data": checkpoint.data,
            }
            (beside / _META).write_text(json.dumps({**meta, "digest": _digest_of_meta(meta)}))
            _sync(beside)
            if final.exists():
                shutil.rmtree(final)
            beside.rename(final)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            shutil.rmtree(beside, ignore_errors=True)
            logger.warning(
                "round %d could not be checkpointed in %s (%s): training goes on, earlier checkpoints are whole",
                position.round,
                self._folder,
                error,
            )
            return
        earlier = [path for path in checkpoints(self._folder) if _round(path) <= position.round]
        for old in earlier[: -self._keep]:  # those of later rounds are another run's, and nobody asked to remove them
            shutil.rmtree(old, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest round first: complete ones, unless somebody has damaged them since."""
    found = [path for path in folder.glob("round-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_round)


def _round(path: Path) -> int:
    return int(path.name.removeprefix("round-"))


def load_checkpoint(resume: str, out: Path, *, contract: str, option: str = "--resume") -> Checkpoint | None:
    """The checkpoint that `option` names: a folder, a name in OUT, or `latest` for the newest there (None without any).

    One that is damaged, or another run's, is passed over where there is an older one.

    Raises:
        SettingsError: there is no such checkpoint, none is whole, or it belongs to another run contract.
    """
    check_resume(resume, out, option=option)
    asked = f"{option} {resume}"
    if resume != "latest":
        return _load(_meant(resume, out), asked, contract)
    found = checkpoints(out / "checkpoints")
    for older, path in reversed(list(zip([None, *found], found, strict=False))):
        try:
            return _load(path, asked, contract)
        except _UnusableError as error:
            if older is None:
                raise
            logger.warning("%s; trying %s", error, older.name)
    return None


def check_resume(resume: str, out: Path | None = None, *, option: str = "--resume") -> None:
    """Raise SettingsError, without reading it, where `option` names what is no checkpoint, here or in OUT if given."""
    try:
        path = _meant(resume, out)
        if resume == "latest" or (path / _META).is_file():
            return
        there = ", ".join(found.name for found in checkpoints(path.parent)) or "none"
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise SettingsError(
            f"{option} {resume[:200]}: {error.strerror}: name a folder checkpoints/round-NNNNNN"
        ) from None
    raise SettingsError(
        f"{option} {resume}: {path} is no checkpoint: name a folder checkpoints/round-NNNNNN "
        f"(in {path.parent}: {there})"
    )


def _meant(name: str, out: Path | None) -> Path:
    """The folder of that name; a bare name that is no folder here is one of OUT's checkpoints."""
    path = Path(name)
    return path if out is None or path.name != name or path.is_dir() else out / "checkpoints" / name


class _UnusableError(SettingsError):
    """This checkpoint cannot be read, or is another run's."""


def _load(path: Path, asked: str, contract: str) -> Checkpoint:
    try:
        meta = json.loads((path / _META).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(asked, path, error) from None
    try:
        if meta.pop("digest") != _digest_of_meta(meta):
            raise ValueError(f"{_META} is not as it was written")
        if changed := [name for name, digest in meta["files"].items() if _digest(path / name) != digest]:
            raise ValueError(f"{', '.join(changed)} not as written")
        outer = load_file(path / _OUTER)
        rest = torch.load(path / _INNER, weights_only=True)
        ledger = Ledger.model_validate_json(json.dumps(meta["ledger"]))
        position = Position(**meta["position"], ledger=ledger)
        theirs = str(meta["contract"])
        checkpoint = Checkpoint(theirs, position, outer, rest["inner"], meta["data"], rest["random"])
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise _damaged(asked, path, error) from None
    if theirs != contract:
        raise _UnusableError(
            f"{asked}: {path} belongs to run contract {theirs[:12]}, this run has {contract[:12]}: "
            f"use the run.toml of its worker (--run {path.parent.parent / 'run.toml'})"
        )
    return checkpoint


def _damaged(asked: str, path: Path, error: Exception) -> _UnusableError:
    return _UnusableError(
        f"{asked}: {path} is damaged ({type(error).__name__}: {_first_line(error)}): name another checkpoint, or none"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _digest_of_meta(meta: dict[str, Any]) -> str:
    return blake3(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def copy_to_host(value: Any) -> Any:
    """A deep copy of nested state with all tensors on the host."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_to_host(item) for item in value]
    return value


def _sync(folder: Path) -> None:
    """Have the files on disk before the rename, so that a power cut leaves no empty ones."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.fsync(file.fileno())
