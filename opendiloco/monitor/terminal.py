"""A snapshot on the terminal. What comes from other peers is text and nothing else: it steers nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from opendiloco.errors import one_line
from opendiloco.monitor.snapshot import Snapshot, WorkerRow
from opendiloco.monitor.troubles import Trouble

COLOURS = {
    "training": "green",
    "averaging": "cyan",
    "following": "yellow",
    "late": "yellow",
    "left": "bright_black",
    "silent": "red",
}
MAX_CELL = 12  # characters: what one worker says leaves room for the others
GONE_S = 300.0
"""For so long workers that have gone are shown."""
ID_LETTERS = 10

Block = list[list[Segment]]
"""Lines of the terminal."""


def short(peer: str) -> str:
    """The end of a peer id: its beginning is the same for most."""
    return peer[-ID_LETTERS:]


@dataclass(frozen=True)
class View:
    """Headline, warnings and workers, one below the other."""

    shown: Snapshot
    is_cropped: bool = False
    """To the lines of the terminal: of warnings and workers is said how many there are besides."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def lines(part: RenderableType) -> Block:
            return console.render_lines(part, options.update(height=None), pad=False)

        head = lines(_headline(self.shown))
        warnings = [lines(_warning(trouble)) for trouble in self.shown.warnings]
        title, *rows = ([line] for line in lines(_table(self.shown)))
        if self.is_cropped:
            room = max(0, options.max_height - len(head) - 1)
            wanted = sum(map(len, warnings))
            warnings = _cropped(warnings, min(wanted, max(room // 2, room - len(rows))), "warnings", lines)
            rows = _cropped(rows, room - sum(map(len, warnings)), "workers", lines)
        for line in chain(head, *warnings, title, *rows):
            yield from line
            yield Segment.line()


def _cropped(blocks: list[Block], room: int, what: str, lines: Callable[[RenderableType], Block]) -> list[Block]:
    """As many as have room, and then a line that says how many have none."""
    if sum(map(len, blocks)) <= room:
        return blocks
    kept: list[Block] = []
    for block in blocks:
        if sum(map(len, kept)) + len(block) >= room:
            break
        kept.append(block)
    return [*kept, lines(Text(f"... and {len(blocks) - len(kept)} more {what}", "bright_black"))]


def _headline(shown: Snapshot) -> Text:
    run = shown.run
    pieces = [
        f"round {shown.round} of {run['rounds']}",
        f"{shown.workers} workers" if shown.workers != 1 else "1 worker",
        f"{shown.tokens_per_s:,.0f} tokens/s",
        f"{shown.committed_tokens:,} tokens trained on",
    ]
    if shown.expected_end is not None:
        pieces.append(f"phase ends in {duration(shown.expected_end - shown.time)}")
    if shown.validation is not None:
        pieces.append(f"validation {shown.validation['loss']:.3f} (round {shown.validation['round']})")
    title = Text(f"{one_line(run['id'])}", "bold")
    title.append(f"  {one_line(run['model'])}, {run['codec']}, H = {run['inner_steps']}", "not bold")
    title.append(f"  contract {run['contract'][:12]}, lineage {shown.lineage[:12]}", "not bold bright_black")
    return title.append("\n").append(" | ".join(pieces), "not bold")


def _warning(trouble: Trouble) -> Text:
    who = ", ".join(map(short, trouble.peers[:4])) + (" ..." if len(trouble.peers) > 4 else "")
    line = Text.assemble((f"{trouble.kind}: ", "bold yellow"), one_line(trouble.message))
    return line.append(f"  ({who})" if who else "", "bright_black")


def _table(shown: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name, width in (("worker", 10), ("state", 9)):
        table.add_column(name, no_wrap=True, min_width=width)
    for name in ("round", "phase", "tokens/s", "Mbit/s", "loss", "version", "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(shown.peers, key=_is_gone):
        if not _is_gone(row) or row.last_seen_s <= GONE_S:
            table.add_row(*_cells(row))
    return table


def _is_gone(row: WorkerRow) -> bool:
    return row.state in ("left", "silent")


def _cells(row: WorkerRow) -> list[Text]:
    is_gone = _is_gone(row)
    cells = [
        "" if is_gone else f"{row.progress:.0%}",
        "" if is_gone else f"{row.tokens_per_s:,.0f}",
        "" if row.bandwidth_mbit is None else f"{row.bandwidth_mbit:,.0f}",
        "" if row.loss is None else f"{row.loss:.3f}",
        one_line(row.version),
        f"{duration(row.last_seen_s)} ago",
    ]
    peer = short(row.peer) + (" (client)" if row.client_mode else "")
    cropped = [Text(cell if len(cell) <= MAX_CELL else f"{cell[: MAX_CELL - 1]}…") for cell in (str(row.round), *cells)]
    return [Text(peer), Text(row.state, COLOURS.get(row.state, "")), *cropped]


def duration(seconds: float) -> str:
    """As people say it."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
