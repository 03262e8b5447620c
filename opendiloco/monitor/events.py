"""What can happen in a run, as a monitor sees it: one JSON object, and one line of a file, for each event.

Whatever is in it came from other peers' records that were checked, and is checked again when it is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, TypeAdapter, ValidationError

from opendiloco.claims import Time, ToldEvaluation, ToldRound

MAX_LINE_BYTES = 4096


@dataclass(frozen=True)
class StateEvent:
    """A worker's state changed."""

    kind: Literal["state"]
    time: Time
    peer: str
    state: Literal["training", "averaging", "following", "late", "left", "silent", "unwatched"]
    """unwatched: from here on nobody knows, until the next one."""


@dataclass(frozen=True)
class RoundEvent:
    """A worker told of a round."""

    kind: Literal["round"]
    time: Time
    peer: str
    told: ToldRound


@dataclass(frozen=True)
class EvaluationEvent:
    """A worker told of an evaluation."""

    kind: Literal["evaluation"]
    time: Time
    peer: str
    told: ToldEvaluation


Event = StateEvent | RoundEvent | EvaluationEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def to_line(event: Event) -> str:
    """As JSON without a line break."""
    return _EVENT.dump_json(event).decode()


def read_events(file: BinaryIO, rounds: int, until: float) -> Iterator[Event]:
    """The events in the lines of a file; what is none, or of a later round or time than the last one, is passed over.

    Args: `until` is that time, Unix seconds.
    """
    is_start = True
    while line := file.readline(MAX_LINE_BYTES):
        is_whole = is_start and line.endswith(b"\n")
        is_start = line.endswith(b"\n")
        if is_whole:
            with contextlib.suppress(ValidationError):
                event = _EVENT.validate_json(line)
                if event.time <= until and (isinstance(event, StateEvent) or event.told.round <= rounds):
                    yield event
