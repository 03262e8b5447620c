"""Tables of results in Markdown, for the documents."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from benchmarks.records import Record, Results, all_of, large, newest, predictions

LABELS = {
    ("hivemind", "fp16"): "hivemind `DecentralizedAverager` fp16",
    ("hivemind", "none"): "hivemind `DecentralizedAverager` none",
    ("gloo", "fp32"): "gloo fp32 (no encryption, fixed membership)",
}
ALLREDUCE_HEADER = (
    "seconds",
    "against hivemind fp16",
    "sent bytes per value",
    "error to the fp64 mean",
    "largest difference between replicas",
)


def origin(results: Results, benchmark: str) -> str:
    """Commit, day, machine and versions of all records, those with the same ones in one row."""
    rows: dict[tuple[str, ...], int] = {}
    for record in all_of(results, benchmark):
        machine, versions = record["machine"], dict(record["versions"])
        versions.pop("opendiloco-p2p", None)
        about = (
            record["commit"],
            datetime.fromtimestamp(record["time"], UTC).strftime("%Y-%m-%d") if "time" in record else "",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
        )
        rows[about] = rows.get(about, 0) + 1
    header = ("records", "commit", "day", "machine", "versions")
    return to_table(header, [(str(count), *about) for about, count in rows.items()])


def allreduce_table(results: Results, benchmark: str) -> str:
    """The largest group and vector, a system and codec a row."""
    records = [record for of_system in large(results, benchmark).values() for record in of_system.values()]
    return to_table(("", *ALLREDUCE_HEADER), _allreduce_rows(records, digits=2))


def allreduce_full_table(results: Results, benchmark: str) -> str:
    """Everything that was measured."""
    records = all_of(results, benchmark)
    sizes = [(str(record["workers"]), f"{record['values'] / 1e6:g}M") for record in records]
    rows = [(*size, *row) for size, row in zip(sizes, _allreduce_rows(records, digits=3), strict=True)]
    return to_table(("workers", "values", "", *ALLREDUCE_HEADER), rows)


def soak_table(results: Results, benchmark: str) -> str:
    """A run a row."""
    rows = []
    for record in all_of(results, benchmark):
        events, again, joins = record["events"], record["survivors_commit_again_s"], record["join_s"]
        rows.append(
            (
                str(record["seed"]),
                f"{record['rounds']} in {record['seconds']:.0f} s",
                ", ".join(f"{events[name]} {name}" for name in sorted(events)),
                f"{again['median']:.1f} ({again['worst']:.1f})",
                f"{joins['median']:.1f} ({joins['worst']:.1f})",
                str(record["rounds_given_up"]),
                str(len(record["divergences"])),
            )
        )
    header = (
        "seed",
        "rounds",
        "events",
        "commit again after s (worst)",
        "join s (worst)",
        "rounds given up",
        "diverged",
    )
    return to_table(header, rows)


def moments_table(results: Results, benchmark: str) -> str:
    """Validation losses after the rounds since the join, by what the third worker's moments start from."""
    record = newest(results, benchmark)
    rows = []
    for third in record["each"][0]:
        after = zip(*(one[third]["validation"] for one in record["each"]), strict=True)
        rows.append((third, *(f"{statistics.mean(losses):.3f}" for losses in after)))
    return to_table(("third worker", *(f"round {number + 1}" for number in range(len(rows[0]) - 1))), rows)


def cost_table(results: Results, benchmark: str) -> str:
    """Share of the time that trains and seconds of an exchange: a model and a number of workers a row."""
    rows, mbits = [], list[str]()
    for model, by_workers in predictions(results, benchmark).items():
        for workers, cells in by_workers.items():
            phase_s = next(iter(cells.values()))["inner_s"]
            shown = (f"{one['utilization']:.0%}, {one['exchange_s']:,.1f} s" for one in cells.values())
            rows.append((model, f"{phase_s / 60:.1f} min", workers, *shown))
            mbits = list(cells)
    return to_table(("model", "phase", "workers", *(f"{int(mbit):,} Mbit/s" for mbit in mbits)), rows)


def to_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def short(value: float) -> str:
    """`1.1e-2`, and `0` for nothing."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def _allreduce_rows(records: Sequence[Record], *, digits: int) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for record in records:
        system, codec, ratio = record["system"], record["codec"], record["ratio_to_hivemind_fp16"]
        rows.append(
            (
                LABELS.get((system, codec), f"{system} {codec}"),
                f"{record['seconds']:.{digits}f}",
                "1" if (system, codec) == ("hivemind", "fp16") else f"{ratio:{'.2f' if ratio < 10 else '.1f'}}x",
                f"{record['sent_bytes_per_value']:.2f}",
                short(record["relative_error"]),
                short(record["replica_difference"]),
            )
        )
    return rows
