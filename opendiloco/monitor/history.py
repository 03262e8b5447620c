"""What has happened in a run since a monitor looks: states of the workers, their rounds, evaluations. In memory.

Events are kept as the lines that files and browsers get. There is a limit to them: whoever has told most gives way
first, so that a peer which tells too much loses what it told, and not what others did.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from opendiloco.claims import MAX_EVALUATIONS, ToldEvaluation, ToldRound
from opendiloco.monitor.events import EvaluationEvent, Event, RoundEvent, StateEvent, to_line
from opendiloco.monitor.sights import FORGET_S, Sight

MAX_EVENTS = 50_000
KEPT_EVENTS = MAX_EVENTS * 9 // 10
"""Left where the limit was passed."""
MAX_NEWS = 4096
"""Taken in at one look; the rest is there at the next."""
CLOSED = ("", "left", "unwatched")
"""States that nothing has to follow."""


@dataclass
class _Known:
    """A worker, as far as it takes to see what is new."""

    state: str = ""
    seen: float = 0.0
    """Time of the last look that found it."""
    round: ToldRound | None = None
    evaluations: deque[ToldEvaluation] = field(default_factory=lambda: deque(maxlen=2 * MAX_EVALUATIONS))


class History:
    """Events in the order in which they were seen. Methods may be called from any thread."""

    def __init__(self, earlier: Iterable[Event] = ()) -> None:
        """Args: `earlier` events, of a monitor that has ended: what it saw of states ends with the last of them."""
        self.life = secrets.token_hex(8)
        """Tells whose numbers events have."""
        self._lock = threading.Lock()
        self._count = 0
        self._lines: dict[int, str] = {}
        """By number, from 1, in order."""
        self._numbers: dict[str, deque[int]] = {}
        """Of the lines of each peer."""
        self._known: dict[str, _Known] = {}
        ended = 0.0
        for event in earlier:
            self._add(event)
            ended = max(ended, event.time)
        for known in self._known.values():
            known.seen = ended
        self.end()

    def look(self, workers: Mapping[str, Sight], now: float) -> None:
        """Take in what is new."""
        with self._lock:
            room = MAX_NEWS
            for peer in sorted(workers, key=lambda peer: len(self._numbers.get(peer, ()))):  # to be fair
                known = self._known.setdefault(peer, _Known())
                known.seen = now
                for event in islice(_news_of(peer, workers[peer], known, now), room):
                    self._add(event)
                    room -= 1
            for peer in self._known.keys() - workers.keys():
                self._end(peer)
                if self._known[peer].seen < now - FORGET_S:
                    del self._known[peer]

    def end(self) -> None:
        """Nobody looks any more: states end where they were last seen."""
        with self._lock:
            for peer in list(self._known):
                self._end(peer)

    def after(self, count: int) -> tuple[list[tuple[int, str]], int]:
        """The lines of events after number `count`, with their numbers, and how many events there have been."""
        with self._lock:
            newest = []
            for number in reversed(self._lines):
                if number <= count:
                    break
                newest.append((number, self._lines[number]))
            return newest[::-1], self._count

    def _end(self, peer: str) -> None:
        known = self._known[peer]
        if known.state not in CLOSED:
            self._add(StateEvent("state", known.seen, peer, "unwatched"))

    def _add(self, event: Event) -> None:
        known = self._known.setdefault(event.peer, _Known())
        match event:
            case StateEvent():
                known.state = event.state
            case RoundEvent():
                known.round = event.told
            case EvaluationEvent():
                known.evaluations.append(event.told)
        self._count += 1
        self._lines[self._count] = to_line(event)
        self._numbers.setdefault(event.peer, deque()).append(self._count)
        if len(self._lines) > MAX_EVENTS:
            self._give_way()

    def _give_way(self) -> None:
        share = fair_share([len(numbers) for numbers in self._numbers.values()], KEPT_EVENTS)
        for numbers in self._numbers.values():
            while len(numbers) > share:
                del self._lines[numbers.popleft()]
        for number in list(islice(self._lines, max(0, len(self._lines) - KEPT_EVENTS))):  # too many for one each
            del self._lines[number]
        self._numbers = {
            peer: left
            for peer, numbers in self._numbers.items()
            if (left := deque(number for number in numbers if number in self._lines))
        }


def _news_of(peer: str, sight: Sight, known: _Known, now: float) -> Iterator[Event]:
    """What is new of a worker, one after the other: `known` changes with each."""
    state = "silent" if sight.is_silent(now) else sight.progress.state
    if known.state != state:
        yield StateEvent("state", now, peer, state)
    if sight.told is None:
        return
    last = known.round
    for told in sight.told.rounds:
        if last is None or (told.ended, told.round) > (last.ended, last.round) or _has_loss_now(told, last):
            yield RoundEvent("round", now, peer, told)
    for evaluated in sight.told.evaluations:
        if evaluated not in known.evaluations:
            yield EvaluationEvent("evaluation", now, peer, evaluated)


def _has_loss_now(told: ToldRound, last: ToldRound) -> bool:
    """Whether it is the last one again, with a loss."""
    return told.round == last.round and told.ended == last.ended and last.loss is None and told.loss is not None


def fair_share(counts: Sequence[int], room: int) -> int:
    """The most that each may keep, at least one, so that all together fit into `room`: small ones stay whole."""
    for place, count in enumerate(sorted(counts)):
        others = len(counts) - place
        if count * others > room:
            return max(1, room // others)
        room -= count
    return max(counts, default=1)
