"""metrics.jsonl: what happened to a worker, one JSON object a line."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from opendiloco.errors import SettingsError
from opendiloco.logs import setup_logging as setup_logging

Verdict = Literal["commit", "retry", "skip", "resync"]

_LOGGER = logging.getLogger("opendiloco")
_WARNING_INTERVAL_S = 60.0


# --- events: one class per kind of line, one field per key ----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. Durations end in _s, sizes in _bytes."""

    event: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class JoinEvent(Event):
    """This worker has its replica and starts to train."""

    event = "join"
    round: int  # committed rounds in the replica
    lineage: str
    source: Literal["fresh", "checkpoint", "swarm"]
    donors: Sequence[str]  # peer ids
    received_bytes: int
    seconds_s: float
    params_hash: str


@dataclass(frozen=True, kw_only=True)
class InnerStepEvent(Event):
    """One inner step, every log.every_steps of them."""

    event = "inner_step"
    round: int
    inner_step: int
    global_inner_step: int
    loss: float
    lr: float  # as stored in the optimizer
    grad_norm: float  # before clipping
    tokens_seen: int
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class RoundEvent(Event):
    """The end of an outer round; None where the verdict leaves nothing to report."""

    event = "round"
    round: int  # t + 1, the round just ended
    verdict: Verdict
    participants: Sequence[str]  # peer ids
    weights: Mapping[str, float]  # peer id -> weight
    lineage: str
    params_hash: str | None
    loss: float  # mean over the inner phase
    inner_steps: int
    tokens: int
    shards: Sequence[int]  # of the text, which this worker has read from; the last one is where it is
    swarm_tokens: int
    inner_s: float
    wait_s: float
    rendezvous_s: float
    allreduce_s: float
    outer_s: float
    sent_bytes: int
    received_bytes: int
    codec: str
    pseudo_gradient_norm: float | None
    outer_gradient_norm: float | None


@dataclass(frozen=True, kw_only=True)
class CatchUpEvent(Event):
    """This worker has moved to where the swarm is, after a round with the verdict resync."""

    event = "catch_up"
    round: int  # committed rounds in the replica now
    lineage: str
    donors: Sequence[str]  # peer ids
    received_bytes: int
    seconds_s: float
    rounds_replayed: int
    full_state: bool
    rounds_given_up: int


@dataclass(frozen=True, kw_only=True)
class EvalEvent(Event):
    """Validation of the outer parameters after a round."""

    event = "eval"
    round: int
    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class LeaveEvent(Event):
    """This worker left in order."""

    event = "leave"
    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something a user should look at; training goes on."""

    event = "warning"
    message: str


# --- metrics.jsonl -------------------------------------------------------------------------------------


class MetricsLog:
    """Appends events to metrics.jsonl, each handed to the operating system when write returns.

    A line cut by an earlier kill is removed on opening. An error while writing (disk full) never stops
    training: the event is lost and the log says so at most once a minute. Thread-safe.
    """

    def __init__(
        self,
        path: Path,
        peer: str,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.lost_events = 0
        self._peer = peer
        self._wall_clock, self._clock = wall_clock, clock
        self._silent_until = -math.inf
        self._takers: list[Callable[[Event, float], None]] = []
        self._lock = threading.Lock()
        try:
            self._file = path.open("ab", buffering=0)
            _repair_tail(self._file, path)
        except OSError as error:
            raise SettingsError(f"cannot write {path}: {error.strerror}: choose another --out") from None

    def write(self, event: Event) -> None:
        """Append one line; `time` is now, floats that are not finite become null."""
        time_s = self._wall_clock()
        line: dict[str, object] = {"event": event.event, "time": time_s, "peer": self._peer}
        line |= {item.name: getattr(event, item.name) for item in fields(event)}
        data = json.dumps(_plain(line), allow_nan=False).encode("ascii") + b"\n"
        with self._lock:
            if self._file.closed:
                return
            try:
                self._append(data)
            except OSError as error:
                self.lost_events += 1
                self._warn(error)
            for take in self._takers:
                take(event, time_s)

    def forward(self, take: Callable[[Event, float], None]) -> None:
        """Hand every later event and its time to `take` too, in the order of the lines; it must not wait or raise."""
        with self._lock:
            self._takers.append(take)

    def _append(self, data: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)  # no half line for later ones to be glued to
            raise

    def _warn(self, error: OSError) -> None:
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + _WARNING_INTERVAL_S
            _LOGGER.warning(
                "cannot write %s: %s: %d events lost so far, training goes on; make room on that disk",
                self.path,
                error.strerror,
                self.lost_events,
            )

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All events of a metrics.jsonl; a last line that is still being written, or was cut, is left out."""
    reader = MetricsReader(path)
    reader.read()
    if _is_event(reader.rest):
        reader.events.append(json.loads(reader.rest))
    return reader.events


class MetricsReader:
    """Follows a metrics.jsonl that may not exist yet: `events` grows with every `read`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self.rest = b""
        """A last line that is not whole yet."""
        self._offset = 0

    def read(self) -> None:
        """Take in the lines that have been written since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            *lines, self.rest = file.read().split(b"\n")
        self._offset += sum(len(line) + 1 for line in lines)
        self.events += [json.loads(line) for line in lines]


def _repair_tail(file: io.FileIO, path: Path) -> None:
    """End the file with a whole line: finish one that lacks only its newline, remove one that is cut."""
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    if _is_event(data[start:]):
        file.write(b"\n")
    elif start < len(data):
        file.truncate(start)


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _plain(value: object) -> object:
    """The value as JSON knows it: no NaN or infinity, no tensors or NumPy scalars, text for the rest."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    item = getattr(value, "item", None)
    return _plain(item()) if callable(item) else str(value)
