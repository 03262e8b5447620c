"""A snapshot on the terminal. What comes from other peers is text and nothing else: it steers nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from opendiloco.errors import one_line
from opendiloco.monitor.snapshot import Snapshot, WorkerRow

COLOURS = {
    "training": "green",
    "averaging": "cyan",
    "following": "yellow",
    "left": "bright_black",
    "silent": "red",
}
GONE_S = 300.0
"""For so long workers that have gone are shown."""
ID_LETTERS = 10


def short(peer: str) -> str:
    """The end of a peer id: its beginning is the same for most."""
    return peer[-ID_LETTERS:]


def render(shown: Snapshot) -> RenderableType:
    """Everything, one below the other."""
    parts: list[RenderableType] = [_headline(shown), _table(shown)]
    if shown.warnings:
        parts.append(Text(""))
    for trouble in shown.warnings:
        who = ", ".join(map(short, trouble.peers[:4])) + (" ..." if len(trouble.peers) > 4 else "")
        line = Text.assemble((f"{trouble.kind}: ", "bold yellow"), one_line(trouble.message))
        parts.append(line.append(f"  ({who})" if who else "", "bright_black"))
    return Group(*parts)


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


def _table(shown: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name in ("worker", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("round", "phase", "tokens/s", "Mbit/s", "loss", "version", "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown.peers:
        if row.state in ("left", "silent") and row.last_seen_s > GONE_S:
            continue
        table.add_row(*_cells(row))
    return table


def _cells(row: WorkerRow) -> list[Text]:
    is_gone = row.state in ("left", "silent")
    cells = [
        "" if is_gone else f"{row.progress:.0%}",
        "" if is_gone else f"{row.tokens_per_s:,.0f}",
        "" if row.bandwidth_mbit is None else f"{row.bandwidth_mbit:,.0f}",
        "" if row.loss is None else f"{row.loss:.3f}",
        one_line(row.version),
        f"{duration(row.last_seen_s)} ago",
    ]
    peer = short(row.peer) + (" (client)" if row.client_mode else "")
    return [Text(peer), Text(row.state, COLOURS.get(row.state, "")), Text(str(row.round)), *map(Text, cells)]


def duration(seconds: float) -> str:
    """As people say it."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
