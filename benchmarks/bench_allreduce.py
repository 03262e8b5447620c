"""How fast and how exact is the all-reduce, against what people would use instead?

Every peer is a process of its own on this machine. All systems are up at the same time and take turns, in another
order every repetition, so that whatever else the machine does hits all alike. A time is that of a whole step, from
the moment all peers ask for it until the last one has its average: rendezvous or matchmaking included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from rich.console import Console
from rich.table import Table

from benchmarks.baselines import System
from benchmarks.common import about, cores, cpu, parse_options, run_script, write_lines
from benchmarks.groups import Cell, measure

INT8, BASELINE, GLOO = System("opendiloco", "int8"), System("hivemind", "fp16"), System("gloo", "fp32")
SYSTEMS = (INT8, System("opendiloco", "fp16"), System("opendiloco", "none"), BASELINE, System("hivemind", "none"), GLOO)
QUICK_SYSTEMS = (INT8, BASELINE, GLOO)
LARGE = (4, 25_000_000)
"""Workers and values of the bar on speed and of the look at what limits it."""
SPEED_BAR, RENDEZVOUS_BAR_S = 1.5, 1.0


def ratio(cell: Cell, cells: Sequence[Cell], name: str = "seconds") -> float | None:
    """How many times as fast as hivemind with fp16: median over the repetitions, each against its own."""
    for other in cells:
        if (other.system, other.workers, other.values) == (BASELINE, cell.workers, cell.values):
            pairs = zip(other.each(name), cell.each(name), strict=True)
            return statistics.median(theirs / own for theirs, own in pairs)
    return None


def to_record(cell: Cell, cells: Sequence[Cell]) -> dict[str, object]:
    """A cell as a JSON object."""
    seconds = cell.each("seconds")
    sent, source = cell.bytes_per_value
    return {
        "benchmark": "allreduce",
        "system": cell.system.name,
        "codec": cell.system.codec,
        "workers": cell.workers,
        "values": cell.values,
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "repetitions": len(seconds),
        "failed": len(cell.problems),
        "rendezvous_s": cell.median("rendezvous_s"),
        "allreduce_s": cell.median("allreduce_s"),
        "ratio_to_hivemind_fp16": ratio(cell, cells),
        "allreduce_ratio_to_hivemind_fp16": ratio(cell, cells, "allreduce_s"),
        "sent_bytes_per_value": sent,
        "sent_bytes_source": source,
        "relative_error": cell.median("relative_error"),
        "replica_difference": max(cell.each("replica_difference")),
        "cpu_s": cell.cpu_s,
        "others_cpu_share": cell.median("others_share"),
    }


def to_table(cells: Sequence[Cell], title: str) -> Table:
    """All cells, one a row."""
    table = Table(title=title, title_justify="left")
    columns = (
        "workers",
        "values",
        "system",
        "seconds (min-max)",
        "rendezvous",
        "speed",
        "bytes/value",
        "error",
        "differ",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "system" else "right")
    for cell in cells:
        seconds = cell.each("seconds")
        speed, (sent, source) = ratio(cell, cells), cell.bytes_per_value
        table.add_row(
            str(cell.workers),
            f"{cell.values / 1e6:g}M",
            cell.system.label,
            f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})",
            f"{cell.median('rendezvous_s'):.3f}",
            "-" if speed is None else f"{speed:.2f}x",
            f"{sent:.2f}{'' if source == 'measured' else '*'}",
            f"{cell.median('relative_error'):.1e}",
            f"{max(cell.each('replica_difference')):.1e}",
            f"{cell.median('others_share'):.0%}",
            end_section=cell.system == cells[-1].system,
        )
    return table


def bars(cells: Sequence[Cell]) -> Iterator[tuple[str, str, bool | None]]:
    """(claim, what was measured, whether it holds); None: was not measured."""
    fast = [ratio(cell, cells) for cell in cells if cell.system == INT8 and (cell.workers, cell.values) == LARGE]
    speed = fast[0] if fast else None
    claim = f"int8 at least {SPEED_BAR:g}x as fast as hivemind's fp16 ({LARGE[0]} workers, {LARGE[1] / 1e6:g}M values)"
    yield claim, "" if speed is None else f"{speed:.2f}x", None if speed is None else speed >= SPEED_BAR
    ours = [cell for cell in cells if cell.system.name == INT8.name]
    largest = max(sample.replica_difference for cell in ours for sample in cell.samples)
    yield "replicas identical", f"largest difference {largest:g}", largest == 0
    waits = [sample.rendezvous_s for cell in ours if cell.workers == LARGE[0] for sample in cell.samples]
    claim = f"rendezvous of {LARGE[0]} workers under {RENDEZVOUS_BAR_S:g} s"
    yield claim, f"at most {max(waits):.3f} s" if waits else "", max(waits) < RENDEZVOUS_BAR_S if waits else None


def limits(cell: Cell) -> str:
    """What an all-reduce of this cell spends the machine's CPU time on."""
    seconds = cell.median("seconds")
    used = cell.cpu_s
    shares = ", ".join(f"{kind} {spent:.2f} s ({spent / (seconds * cores()):.0%})" for kind, spent in used.items())
    busy = sum(used.values()) / (seconds * cores())
    return (
        f"{cell.system.label}, {cell.workers} workers, {cell.values / 1e6:g}M values: {seconds:.2f} s on {cores()} "
        f"cores, which are {busy:.0%} busy with it; CPU time: {shares}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit code does not depend on the bars."""
    options = _parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    cells: list[Cell] = []
    for workers, values in itertools.product(options.workers, options.values):
        systems = QUICK_SYSTEMS if options.quick else SYSTEMS
        cells += measure(
            systems, workers=workers, values=values, repetitions=options.repetitions, patience_s=options.patience
        )
    facts = about()
    write_lines(options.out, [{**to_record(cell, cells), **facts} for cell in cells])
    title = f"All-reduce, {options.repetitions} repetitions, {cores()} cores of {cpu()}"
    console.print(to_table(cells, title))
    console.print(
        "speed: against hivemind fp16. bytes/value: sent by one peer, * computed (2 (k - 1) / k values). "
        "differ: largest difference between replicas. others: CPU time that everything else on the machine took.",
        highlight=False,
    )
    for cell in cells:
        for problem in cell.problems:
            console.print(
                f"failed and repeated: {cell.system.label}, {cell.workers} workers: {problem}", highlight=False
            )
    for claim, measured, holds in bars(cells):
        word = "not measured" if holds is None else "pass" if holds else "FAIL"
        console.print(f"{word}: {claim}{f': {measured}' if measured else ''}", highlight=False)
    for cell in cells:
        if cell.system in (INT8, BASELINE):
            console.print(limits(cell), highlight=False)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch.sh bench allreduce", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", metavar="K", default=[2, 4], help="peers (default 2 4)")
    parser.add_argument(
        "--values",
        type=int,
        nargs="+",
        metavar="N",
        default=[1_000_000, 25_000_000],
        help="vector sizes (default 1000000 25000000)",
    )
    parser.add_argument("--repetitions", type=int, metavar="N", default=5, help="of everything (default 5)")
    parser.add_argument(
        "--patience", type=float, metavar="S", default=10.0, help="seconds to wait for a quiet machine (default 10)"
    )
    quick = {"workers": [2], "values": [10_000], "repetitions": 2, "patience": 0.0}
    options = parse_options(parser, "allreduce", argv, quick=quick)
    if min(*options.workers, *options.values, options.repetitions) < 1:
        parser.error("--workers, --values and --repetitions take numbers of at least 1")
    return options


if __name__ == "__main__":
    run_script("bench_allreduce", main)
