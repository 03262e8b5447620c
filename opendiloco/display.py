"""What a person sees of a worker: one log line per round, and on a terminal a live line of progress."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from opendiloco.config import Contract
from opendiloco.metrics import EvalEvent, RoundEvent


def round_line(event: RoundEvent, *, live: int, reason: str, has_vote: bool = True) -> str:
    """The log line of one attempt at a round; `has_vote`: whether this worker's own work is in it."""
    behind = event.verdict == "resync"  # and does not know who takes part
    without = "" if has_vote or event.verdict != "commit" else " (without this one)"
    wire_bytes = event.sent_bytes + event.received_bytes
    rate = f", {wire_bytes * 8e-6 / event.allreduce_s:.0f} Mbit/s" if event.allreduce_s > 0 else ""
    exchanged = f" ({wire_bytes / 1e6:.1f} MB {event.codec}{rate})" if wire_bytes else ""  # alone nothing is
    return (
        f"round {event.round} | "
        + ("" if behind else f"{len(event.participants)} of {live} workers{without} | ")
        + f"loss {event.loss:.3f} | "
        f"inner {event.inner_s:.1f} s, wait {event.wait_s:.1f} s, "
        f"all-reduce {event.allreduce_s:.1f} s{exchanged} | "
        f"{event.verdict} {event.lineage[:6]}"
        + (f" | replica {event.params_hash[:12]}" if event.params_hash else "")
        + (f" | {reason}" if reason else "")
    )


def evaluation_line(event: EvalEvent) -> str:
    """The log line of an evaluation."""
    return (
        f"round {event.round} | validation loss {event.loss:.4f} | perplexity {event.perplexity:.2f} | "
        f"{event.tokens} tokens"
    )


class _Terminal:
    """A terminal that may end before what writes to it."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._terminal.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


class Display:
    """A live line on the terminal: inner steps of the round, workers, loss, tokens/s, bytes. Silent elsewhere."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._workers = 0
        self._bytes = 0
        self._validation = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            expand=True,  # so that the facts give way where the terminal is narrow
            console=Console(file=cast(TextIO, _Terminal(sys.stderr))),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("starting", total=contract.inner.steps, facts="")

    def inner_step(self, round: int, done: int, *, loss: float, tokens_per_s: float) -> None:
        """After each inner step; `done` counts those of this round, the one after `round` committed ones."""
        workers = f"{self._workers} workers | " if self._workers else ""
        exchanged = f" | {self._bytes / 1e6:.1f} MB" if self._bytes else ""
        facts = f"{workers}loss {loss:.3f}{self._validation} | {tokens_per_s:,.0f} tokens/s{exchanged}"
        description = f"round {round + 1}/{self._contract.run.rounds}"
        self._progress.update(self._task, description=description, completed=done, facts=facts)

    def round(self, event: RoundEvent, *, live: int) -> None:
        """After each attempt at a round."""
        self._workers = live
        self._bytes += event.sent_bytes + event.received_bytes

    def evaluation(self, loss: float) -> None:
        """After each validation."""
        self._validation = f" | validation {loss:.3f}"

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
