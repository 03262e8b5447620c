"""Metric sinks: further places for the events of a worker, which never stop or slow its training.

Every sink has a thread of its own and a bounded queue before it. Whatever a sink does, raise, hang or take its time,
costs events of that sink and a warning a minute. Its thread is a daemon, and commands end with `os._exit`: a library's
own threads and what it hooks to the end of the interpreter cannot hold up the end of a worker.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, Self

from opendiloco.metrics import Event
from opendiloco.scalars import Point
from opendiloco.scalars import point as point_of

QUEUE_EVENTS = 1000
"""Events that wait for a sink; more are dropped."""
WARNING_INTERVAL_S = 60.0
"""A sink warns at most so often."""
HANG_S = 30.0
"""A call into a sink that takes longer is worth a warning."""
RETRY_S, RETRY_LIMIT_S = 60.0, 3600.0
"""Seconds until a sink that did not start is started again: the first time, and at most (they double)."""
CLOSE_S = 2.0
"""What all sinks together get to finish."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A place for metrics. All calls come from one thread, in this order; each may raise and may take for ever."""

    def open(self) -> str:
        """Start, and say where a person finds what is written; is called again after it has raised."""
        ...

    def write(self, point: Point) -> None:
        """Take one event."""
        ...

    def close(self) -> None:
        """Finish: everything that was written is safe."""
        ...


class Sinks:
    """The further sinks of one worker. `take` never waits for a sink and never raises because of one."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        *,
        inner_steps: int,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        """Start a thread for each sink.

        Args:
            sinks: by name, as warnings call them.
            inner_steps: of a round, for the axis of steps.
            clock: for how long a call takes and since when a sink has been silent, in seconds.
            retry_s: until a sink that did not start is started again.
        """
        self._feeds = [
            _Feed(name, sink, inner_steps=inner_steps, clock=clock, retry_s=retry_s) for name, sink in sinks.items()
        ]

    def take(self, event: Event, time_s: float) -> None:
        """Queue an event of Unix time `time_s` for every sink."""
        for feed in self._feeds:
            feed.put(event, time_s)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Let the sinks finish; those that need more than `limit_s` seconds are left behind."""
        give_up = time.monotonic() + limit_s
        for feed in self._feeds:
            feed.finish()
        for feed in self._feeds:
            feed.leave_behind(after_s=max(0.0, give_up - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Feed:
    """One sink's queue and thread. The lock is never held while the sink is called."""

    def __init__(self, name: str, sink: Sink, *, inner_steps: int, clock: Callable[[], float], retry_s: float) -> None:
        self._name, self._sink = name, sink
        self._inner_steps, self._clock, self._retry_s = inner_steps, clock, retry_s
        self._queue: deque[tuple[Event, float]] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._call: tuple[str, float] | None = None  # into the sink, and since when
        self._last_step = 0
        self._lost_events = 0
        self._silent_until = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    # --- the worker's side -------------------------------------------------------------------------------

    def put(self, event: Event, time_s: float) -> None:
        problem = ""
        with self._changed:
            if self._is_closing:
                return
            if len(self._queue) < QUEUE_EVENTS:
                self._queue.append((event, time_s))
                self._changed.notify()
            else:
                self._lost_events += 1
                problem = f"{len(self._queue)} events wait already"
            if self._call is not None and (taken_s := self._clock() - self._call[1]) > HANG_S:
                problem = f"{self._call[0]} takes {taken_s:.0f} s so far"
        if problem:
            self._warn(problem)

    def finish(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def leave_behind(self, *, after_s: float) -> None:
        self._thread.join(after_s)
        with self._changed:
            self._lost_events += len(self._queue) + (self._call is not None and self._call[0] == "write")
            is_lost = self._thread.is_alive() or bool(self._queue)
            self._queue.clear()
            what = f"{self._call[0]} was not done" if self._call is not None else "it was not started"
        if is_lost:
            self._warn(f"{what} when the worker ended", outlook="")
        with self._changed:
            self._silent_until = math.inf

    def _warn(self, problem: str, *, outlook: str = ", training goes on") -> None:
        with self._changed:
            now = self._clock()
            if now < self._silent_until:
                return
            self._silent_until = now + WARNING_INTERVAL_S
            lost = f"{self._lost_events} events lost so far"
        logger.warning("sink %s: %s: %s%s (metrics.jsonl has all of them)", self._name, problem, lost, outlook)

    # --- the sink's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._open():
            return
        while (item := self._next()) is not None:
            self._try("write", partial(self._write, *item), costs=1)
        self._try("close", self._sink.close)

    def _open(self) -> bool:
        """Start the sink, again and again if need be; False when the worker is done before."""
        pause_s = self._retry_s
        while not self._try("start", self._start):
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, pause_s):
                    return False
            pause_s = min(2 * pause_s, RETRY_LIMIT_S)
        return True

    def _start(self) -> None:
        logger.info("sink %s: %s", self._name, self._sink.open())

    def _next(self) -> tuple[Event, float] | None:
        """The next event, or None once the worker is done and the queue empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            return self._queue.popleft() if self._queue else None

    def _write(self, event: Event, time_s: float) -> None:
        point = point_of(event, time_s=time_s, inner_steps=self._inner_steps, last_step=self._last_step)
        self._last_step = max(self._last_step, point.step)
        self._sink.write(point)

    def _try(self, what: str, call: Callable[[], None], *, costs: int = 0) -> bool:
        """Call into the sink; whether it went well."""
        with self._changed:
            self._call = (what, self._clock())
        try:
            call()
        except BaseException as error:  # SystemExit of a library is the sink's affair too
            problem = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            problem = ""
        with self._changed:
            self._call = None
            self._lost_events += costs if problem else 0
        if problem:
            self._warn(problem)
        return not problem
