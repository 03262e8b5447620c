"""What metric sinks get of an event: numbers under stable names and lines of text, over global inner steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from opendiloco.metrics import (
    CatchUpEvent,
    EvalEvent,
    Event,
    InnerStepEvent,
    JoinEvent,
    LeaveEvent,
    RoundEvent,
    WarningEvent,
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One event, as sinks take it."""

    step: int
    """Global inner steps before it; a round that has just ended stands where the next one begins."""
    time_s: float
    """Unix seconds."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Name (inner/loss, round/allreduce_s, ...) -> finite number."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Name (events/join, ...) -> one line."""


def point(event: Event, *, time_s: float, inner_steps: int, last_step: int) -> Point:
    """The event as a point; a field that is None or not finite gives no number.

    Args:
        time_s: when it was, in Unix seconds.
        inner_steps: of a round, inner.steps.
        last_step: where an event without a place on the axis goes.
    """
    match event:
        case InnerStepEvent():
            scalars = _numbers("inner", event, leave_out={"round", "inner_step", "global_inner_step"})
            return Point(step=event.global_inner_step, time_s=time_s, scalars=scalars)
        case RoundEvent():
            scalars = _numbers("round", event, leave_out={"round"})
            scalars["round/number"] = float(event.round)
            scalars["round/participants"] = float(len(event.participants))
            scalars["round/committed"] = float(event.verdict == "commit")
            texts = {} if event.verdict == "commit" else {"events/round": f"round {event.round}: {event.verdict}"}
            return Point(step=event.round * inner_steps, time_s=time_s, scalars=scalars, texts=texts)
        case EvalEvent():
            scalars = _numbers("validation", event, leave_out={"round", "tokens"})
            return Point(step=event.round * inner_steps, time_s=time_s, scalars=scalars)
        case JoinEvent():
            text = f"joined at round {event.round} ({event.source}, {len(event.donors)} donors)"
            scalars = _numbers("join", event, leave_out={"round"})
            step = event.round * inner_steps
            return Point(step=step, time_s=time_s, scalars=scalars, texts={"events/join": text})
        case CatchUpEvent():
            what = "whole state" if event.full_state else f"{event.rounds_replayed} rounds"
            text = f"caught up to round {event.round} ({what}, {len(event.donors)} donors)"
            scalars = _numbers("catch_up", event, leave_out={"round", "full_state"})
            step = event.round * inner_steps
            return Point(step=step, time_s=time_s, scalars=scalars, texts={"events/catch_up": text})
        case LeaveEvent():
            text = f"left at round {event.round}: {event.reason}"
            return Point(step=max(last_step, event.round * inner_steps), time_s=time_s, texts={"events/leave": text})
        case WarningEvent():
            return Point(step=last_step, time_s=time_s, texts={"events/warning": " ".join(event.message.split())})
        case _:
            return Point(step=last_step, time_s=time_s)


def _numbers(prefix: str, event: Event, *, leave_out: set[str]) -> dict[str, float]:
    """Every number among the event's fields, so that a field that is added later needs nothing here."""
    values = {item.name: getattr(event, item.name) for item in fields(event) if item.name not in leave_out}
    return {
        f"{prefix}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
