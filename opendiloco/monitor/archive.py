"""Keeps the history of the run that is followed; in a folder, each run has a file of its own, which has its name."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from opendiloco.errors import SettingsError
from opendiloco.monitor.events import Event, read_events
from opendiloco.monitor.history import History
from opendiloco.monitor.sights import Sight, with_contract
from opendiloco.monitor.snapshot import Snapshot

APPENDED_BYTES = 16 * 2**20
"""After so much a file is written anew, with what the history still has."""
MAX_READ_BYTES = 64 * 2**20
"""Of a file, its end: more than one ever has."""
MAX_AHEAD_S = 3600.0  # of events in a file: clocks are set back, but not by that much
RETRY_S = 60.0
"""From a file that could not be written to the next try."""

logger = logging.getLogger(__name__)


class Archive:
    """One history at a time, in memory, and in a file if there is a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        """Args: `folder` of the files; None: there is none.

        Raises:
            SettingsError: it cannot be written, or another monitor keeps its history there.
        """
        self.history = History()
        """Of the run that is followed; an empty one before there is any."""
        self._folder, self._run = folder, ("", "")
        self._file: _File | None = None
        self._lock = _claim(folder) if folder is not None else None

    def take(self, workers: Mapping[str, Sight], shown: Snapshot) -> None:
        """What a look has found; the history is another one once another run is followed, or another contract.

        Raises:
            SettingsError: the file of a run that is new cannot be read or written.
        """
        run = shown.run["id"], shown.run["contract"]
        if run != self._run:
            self._end_file()
            self.history = self._history_of(*run, rounds=shown.run["rounds"], now=shown.time)
            self._run = run
        self.history.look(with_contract(workers, run[1]), shown.time)
        if self._file is not None:
            self._file.write(self.history, shown.time)

    def close(self) -> None:
        """Nothing more comes."""
        self._end_file()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_file(self) -> None:
        if self._file is not None:
            self.history.end()
            self._file.write(self.history, math.inf)  # the last time
            self._file.close()
            self._file = None

    def _history_of(self, run_id: str, contract: str, *, rounds: int, now: float) -> History:
        if self._folder is None:
            return History()
        path = self._folder / f"history-{run_id}-{contract[:12]}.jsonl"
        earlier: list[Event] = []
        if path.exists() and not path.is_file():
            raise SettingsError(f"{path} is no regular file: choose another --out")
        try:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_READ_BYTES))
                earlier = list(read_events(file, rounds, now + MAX_AHEAD_S))
        except OSError as error:
            raise _cannot("read", path, error) from None
        history = History(earlier)
        try:
            self._file = _File(path, history)
        except OSError as error:
            raise _cannot("write", path, error) from None
        logger.info(
            "the history of run %s, contract %s, is in %s, with %d events so far",
            run_id,
            contract[:12],
            path,
            len(earlier),
        )
        return history


class _File:
    """The file of a history. A disk that is full costs a while of it, and nothing else."""

    def __init__(self, path: Path, history: History) -> None:
        """Raises OSError."""
        self._path = path
        self._file: FileIO | None = None
        self._count = self._appended = 0
        self._retry_at = 0.0
        self._renew(history)

    def write(self, history: History, now: float) -> None:
        """What is new."""
        try:
            if self._file is None or self._appended > APPENDED_BYTES:
                if now >= self._retry_at:
                    self._renew(history)
                return
            lines, count = history.after(self._count)
            data = _joined(lines)
            if self._file.write(data) < len(data):
                raise OSError("the disk is full")
            self._count, self._appended = count, self._appended + len(data)
        except OSError:  # part of a line may be there: next time all of it
            self.close()
            self._retry_at = now + RETRY_S

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _renew(self, history: History) -> None:
        """All that the history has, in the place of what was there."""
        self.close()
        lines, count = history.after(0)
        part = self._path.with_suffix(".part")
        try:
            part.unlink(missing_ok=True)  # whatever it is
            part.write_bytes(_joined(lines))
            part.replace(self._path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._file = self._path.open("ab", buffering=0)
        self._count, self._appended = count, 0


def _claim(folder: Path) -> int:
    """The descriptor that keeps other monitors out of the folder, until it is closed or this process has ended."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _cannot("write", folder, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SettingsError(f"another monitor keeps its history in {folder}: choose another --out") from None
    except OSError:
        logger.info("%s is on a disk that has no locks: no other monitor may write there", folder)
    return descriptor


def _joined(lines: list[tuple[int, str]]) -> bytes:
    return "".join(f"{line}\n" for _, line in lines).encode()


def _cannot(what: str, path: Path, error: OSError) -> SettingsError:
    return SettingsError(f"cannot {what} {path}: {error.strerror}: choose another --out")
