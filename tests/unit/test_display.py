"""The live line on a terminal: which round, how far, and only then the rest."""

from __future__ import annotations

import dataclasses
import errno
import io
import re
import sys

import pytest
from support.sinking import round_event

from opendiloco.config import Contract
from opendiloco.display import Display, round_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def last_line(self) -> str:
        """What stands there, without the terminal's control sequences."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())
        return [line for line in re.split(r"[\r\n]", text) if line.strip()][-1]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_line_says_the_round_that_is_trained_in_and_the_step_on_any_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a joiner, before its first round ends."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    contract = Contract.model_validate({"run": {"rounds": 50}, "inner": {"steps": 500}})
    with Display(contract) as display:
        display.inner_step(10, 123, loss=2.5, tokens_per_s=1e6)
        display._progress.refresh()
        assert re.match(r"round 11/50 .* 123/500 loss 2\.5", terminal.last_line)
        display.round(round_event(), live=1000)
        display.evaluation(2.75)
        display.inner_step(12, 7, loss=2.5, tokens_per_s=1e6)
        display._progress.refresh()
        assert re.match(r"round 13/50 .*  ?7/500 1000 workers", terminal.last_line)


def test_a_terminal_that_ends_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(Terminal):
        has_ended = False

        def write(self, text: str) -> int:
            if self.has_ended:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    terminal = Ending()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Display(Contract()) as display:
        terminal.has_ended = True
        display.inner_step(10, 123, loss=2.5, tokens_per_s=1e6)
        display._progress.refresh()


def test_a_worker_that_is_behind_does_not_say_who_takes_part() -> None:
    assert "2 of 3 workers" in round_line(round_event("retry"), live=3, reason="b: gone")
    assert "workers" not in round_line(round_event("resync"), live=1, reason="the swarm is at round 35")


def test_where_nothing_was_sent_no_rate_is_shown() -> None:
    alone = dataclasses.replace(round_event(), sent_bytes=0, received_bytes=0, allreduce_s=0.001)
    assert "all-reduce 0.0 s | commit" in round_line(alone, live=1, reason="")
    assert re.search(
        r"all-reduce \S+ s \(\S+ MB int8, \S+ Mbit/s\) \| commit", round_line(round_event(), live=3, reason="")
    )
