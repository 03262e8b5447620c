"""What the metrics of a run tell about a model: participants, validation, bytes. For its card.

Metrics may be missing, cut, or from several lives of a worker: what they do not tell is None, nothing is guessed.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendiloco.rounds import Position


@dataclass(frozen=True)
class Validation:
    """One evaluation of the outer parameters."""

    round: int
    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class RunFacts:
    """As far as the metrics tell."""

    rounds: int
    """Committed rounds that they tell of."""
    participants: int | None
    """Different workers in them."""
    fewest: int | None
    most: int | None
    """Participants of a round, at least and at most."""
    first: Validation | None
    last: Validation | None
    """The first and the last evaluation; the same one when there is only one."""
    sent_bytes: int | None
    """Mean of what one worker sent in a round."""


def read_facts(files: Sequence[Path], position: Position | None) -> RunFacts:
    """Facts about the parameters at `position`, from the metrics.jsonl of one or several workers of a run.

    A round that a worker did again counts as it went the last time; rounds after `position` do not count.
    """
    rounds: dict[tuple[Path, int], dict[str, Any]] = {}
    evaluations: dict[int, Validation] = {}
    for file in files:
        own_rounds, own_evaluations = _last_run(_events(file))
        for number, line in own_rounds.items():
            if position is None or number < position.round or line.get("lineage") == position.lineage:
                rounds[file, number] = line
            else:  # after `position`, or given up for it
                own_evaluations.pop(number, None)
        for number, found in own_evaluations.items():
            known = evaluations.get(number)
            if (position is None or number <= position.round) and (known is None or found.tokens >= known.tokens):
                evaluations[number] = found
    groups = [group for line in rounds.values() if (group := _peers(line.get("participants")))]
    sent = [bytes_ for line in rounds.values() if (bytes_ := _number(line.get("sent_bytes"))) is not None]
    return RunFacts(
        rounds=len({number for _, number in rounds}),
        participants=len(set().union(*groups)) if groups else None,
        fewest=min(map(len, groups), default=None),
        most=max(map(len, groups), default=None),
        first=evaluations[min(evaluations)] if evaluations else None,
        last=evaluations[max(evaluations)] if evaluations else None,
        sent_bytes=round(sum(sent) / len(sent)) if sent else None,
    )


def _last_run(events: Iterable[Mapping[str, Any]]) -> tuple[dict[int, dict[str, Any]], dict[int, Validation]]:
    """Committed rounds and evaluations since the worker last started from nothing, by round."""
    rounds: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, Validation] = {}
    for event in events:
        number = event.get("round")
        if not isinstance(number, int):
            continue
        if event.get("event") == "join" and (number, event.get("source")) == (0, "fresh"):
            rounds.clear()
            evaluations.clear()
        elif event.get("event") == "round" and event.get("verdict") == "commit":
            rounds[number] = dict(event)
            evaluations.pop(number, None)  # of an earlier life
        elif event.get("event") == "eval" and (found := _validation(number, event)) is not None:
            known = evaluations.get(number)
            if known is None or found.tokens >= known.tokens:  # the parts of several workers come before their sum
                evaluations[number] = found
    return rounds, evaluations


def _validation(round: int, event: Mapping[str, Any]) -> Validation | None:
    loss, perplexity, tokens = (_number(event.get(name)) for name in ("loss", "perplexity", "tokens"))
    if loss is None or perplexity is None or tokens is None:
        return None
    return Validation(round, loss, perplexity, int(tokens))


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Lines that are events; a file that is not there has none."""
    with contextlib.suppress(OSError), file.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(event := json.loads(line), dict):
                    yield event


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _peers(value: object) -> set[str]:
    return {peer for peer in value if isinstance(peer, str)} if isinstance(value, list) else set()
