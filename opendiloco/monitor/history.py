"""What has happened in a run since a monitor looks: states of the workers, their rounds, evaluations; kept in a file.

The file has one JSON object a line and is read again by the next start. Whatever is in it came from other peers'
records that were checked, and is checked again when it is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from opendiloco.claims import MAX_EVALUATIONS, ToldEvaluation, ToldRound
from opendiloco.errors import SettingsError
from opendiloco.monitor.sights import Sight

MAX_EVENTS = 50_000
"""Kept in memory and read from a file; the oldest give way."""
MAX_LINE_BYTES = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateEvent:
    """A worker's state changed."""

    kind: Literal["state"]
    time: float
    peer: str
    state: Literal["training", "averaging", "following", "left", "silent"]


@dataclass(frozen=True)
class RoundEvent:
    """A worker told of a round."""

    kind: Literal["round"]
    time: float
    peer: str
    told: ToldRound


@dataclass(frozen=True)
class EvaluationEvent:
    """A worker told of an evaluation."""

    kind: Literal["evaluation"]
    time: float
    peer: str
    told: ToldEvaluation


Event = StateEvent | RoundEvent | EvaluationEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class History:
    """Events in the order in which they were seen."""

    def __init__(self, file: Path | None = None) -> None:
        """Args: `file` keeps them; what it has already is read.

        Raises:
            SettingsError: it cannot be written.
        """
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.count = 0
        """Of all events so far: what `since` counts."""
        self._states: dict[str, str] = {}
        self._rounds: dict[str, ToldRound] = {}
        self._evaluations: dict[str, list[ToldEvaluation]] = {}
        self._file = None
        if file is not None:
            self._read(file)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._file = file.open("a", encoding="ascii")
            except OSError as error:
                raise SettingsError(f"cannot write {file}: {error.strerror}: choose another --out") from None

    def look(self, workers: Mapping[str, Sight], now: float) -> None:
        """Take in what is new."""
        for peer, sight in workers.items():
            state = "silent" if sight.is_silent(now) else sight.progress.state
            if self._states.get(peer) != state:
                self._add(StateEvent("state", now, peer, state))
            if sight.told is None:
                continue
            last = self._rounds.get(peer)
            for told in sight.told.rounds:
                if last is None or (told.ended, told.round) > (last.ended, last.round) or _has_loss_now(told, last):
                    self._add(RoundEvent("round", now, peer, told))
            for evaluated in sight.told.evaluations:
                if evaluated not in self._evaluations.get(peer, ()):
                    self._add(EvaluationEvent("evaluation", now, peer, evaluated))
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk costs history, and nothing else
                self._file.flush()

    def since(self, count: int) -> list[dict[str, Any]]:
        """The events after the first `count`, as plain values."""
        kept_from = self.count - len(self.events)
        return [to_plain(event) for event in islice(self.events, max(0, count - kept_from), None)]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _add(self, event: Event) -> None:
        self._note(event)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(json.dumps(to_plain(event)) + "\n")

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.count += 1
        match event:
            case StateEvent(peer=peer, state=state):
                self._states[peer] = state
            case RoundEvent(peer=peer, told=told):
                self._rounds[peer] = told
            case EvaluationEvent(peer=peer, told=evaluated):
                self._evaluations[peer] = [*self._evaluations.get(peer, []), evaluated][-2 * MAX_EVALUATIONS :]

    def _read(self, file: Path) -> None:
        if not file.exists():
            return
        try:
            with file.open("rb") as lines:
                for event in parse(lines):
                    self._note(event)
        except OSError as error:
            raise SettingsError(f"cannot read {file}: {error.strerror}: choose another --out") from None


def parse(lines: Iterable[bytes]) -> Iterable[Event]:
    """The events in lines of a file; what is none is passed over."""
    for line in lines:
        if len(line) <= MAX_LINE_BYTES:
            with contextlib.suppress(ValidationError):
                yield _EVENT.validate_json(line)


def to_plain(event: Event) -> dict[str, Any]:
    """As JSON has it."""
    plain = asdict(event)
    if isinstance(event, RoundEvent | EvaluationEvent):
        plain["told"] = event.told.model_dump()
    return plain


def _has_loss_now(told: ToldRound, last: ToldRound) -> bool:
    """Whether it is the last one again, with a loss."""
    return told.round == last.round and told.ended == last.ended and last.loss is None and told.loss is not None
