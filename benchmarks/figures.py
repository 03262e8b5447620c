"""What the documents say of the results: a value for every placeholder, from the newest record of a benchmark. Pure.

`kill.median_s` is a field of the newest record in `results/kill.jsonl`, `soak.join_s.median` a field of a field. Beside
them stand the values in `DERIVED`, which follow from records.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.cost import Measured, fit

Record = Mapping[str, Any]
Results = Mapping[str, Sequence[Record]]
"""Records by benchmark, in the order in which they were written."""

INTERVAL_SHARE = 0.95
"""Of `bench_worker.interval`."""
GROWTH = 1.01
"""Of memory, threads and descriptors: what counts as the same."""
LABELS = {
    ("hivemind", "fp16"): "hivemind `DecentralizedAverager` fp16",
    ("hivemind", "none"): "hivemind `DecentralizedAverager` none",
    ("gloo", "fp32"): "gloo fp32 (no encryption, fixed membership)",
}


class NoSourceError(Exception):
    """Nothing in the results says this; the message names the benchmark and what it lacks."""

    def __init__(self, benchmark: str, lacks: str) -> None:
        super().__init__(lacks)
        self.benchmark = benchmark


def value_of(results: Results, path: str) -> Any:
    """The value of a placeholder.

    Args:
        path: `benchmark.field`, with the fields of that field behind further dots.

    Raises:
        NoSourceError: there is no such record, or it has no such field.
    """
    benchmark, _, rest = path.partition(".")
    first, *others = rest.split(".")
    derive = DERIVED.get(benchmark, {}).get(first) or COMMON.get(first)
    try:
        value = derive(results, benchmark) if derive else newest(results, benchmark)[first]
        for name in others:
            value = value[name]
    except (KeyError, IndexError) as error:
        raise NoSourceError(benchmark, f"has no field {error.args[0]}") from None
    except (TypeError, ValueError, ArithmeticError) as error:  # a field is of another kind than it should be
        raise NoSourceError(benchmark, f"does not say it ({error})") from None
    return value


def newest(results: Results, benchmark: str) -> Record:
    """The record written last."""
    return all_of(results, benchmark)[-1]


def all_of(results: Results, benchmark: str) -> Sequence[Record]:
    """All records of a benchmark, at least one."""
    if not results.get(benchmark):
        raise NoSourceError(benchmark, "has no record")
    return results[benchmark]


def to_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def short(value: float) -> str:
    """`1.1e-2`, and `0` for nothing."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


# --- all benchmarks ---------------------------------------------------------------------------------------


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


COMMON: dict[str, Callable[[Results, str], Any]] = {"origin": origin}

# --- all-reduce -------------------------------------------------------------------------------------------


def large(results: Results, benchmark: str) -> dict[str, dict[str, Record]]:
    """Records of the largest group and vector, by system and codec."""
    records = all_of(results, benchmark)
    size = max((record["workers"], record["values"]) for record in records)
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if (record["workers"], record["values"]) == size:
            found.setdefault(record["system"], {})[record["codec"]] = record
    return found


def small(results: Results, benchmark: str) -> Record:
    """A record of the smallest group and vector."""
    return min(all_of(results, benchmark), key=lambda record: (record["workers"], record["values"]))


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


ALLREDUCE_HEADER = (
    "seconds",
    "against hivemind fp16",
    "sent bytes per value",
    "error to the fp64 mean",
    "largest difference between replicas",
)


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


def cpu_shares(results: Results, benchmark: str) -> dict[str, float]:
    """Of the machine's CPU time while int8 averages are on their way: by kind of process, and all together."""
    record = large(results, benchmark)["opendiloco"]["int8"]
    available_s = record["seconds"] * record["machine"]["cores"]
    used = {kind.replace(" ", "_"): spent_s / available_s for kind, spent_s in record["cpu_s"].items()}
    return {**used, "all": sum(used.values())}


def cpu_mbit(results: Results, benchmark: str) -> int:
    """Mbit/s at which a worker sends while the CPU limits it, to the nearest ten."""
    record = large(results, benchmark)["opendiloco"]["int8"]
    sent_bits = record["sent_bytes_per_value"] * record["values"] * 8
    return int(round(sent_bits / record["allreduce_s"] / 1e6, -1))


# --- rounds -----------------------------------------------------------------------------------------------


def by_rate(codec: str) -> Callable[[Results, str], dict[str, Record]]:
    """A codec's rounds over the fastest and the slowest links."""

    def choose(results: Results, benchmark: str) -> dict[str, Record]:
        records = sorted(
            (record for record in all_of(results, benchmark) if record["codec"] == codec), key=lambda one: one["mbit"]
        )
        return {"fastest": records[-1], "slowest": records[0]}

    return choose


def wan_table(results: Results, benchmark: str) -> str:
    """A codec and rate a row."""
    rows = [
        (
            f"{record['codec']}, {record['mbit']:g} Mbit/s",
            f"{record['round_s']:.2f}",
            f"{record['worst_s']:.2f}",
            f"{record['rendezvous_s']:.2f}",
            f"{record['wire_limit_s']:.2f}",
            f"{record['carried_bytes_per_round'] / 1e6:.1f}",
            str(record["rounds"]),
        )
        for record in all_of(results, benchmark)
    ]
    header = (
        "",
        "exchange, median s",
        "worst s",
        "rendezvous s",
        "payload alone s",
        "MB on a link, both ways",
        "rounds",
    )
    return to_table(header, rows)


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


def rounds_per_event(results: Results, benchmark: str) -> int:
    """Of a soak, rounded."""
    record = newest(results, benchmark)
    events: int = sum(record["events"].values())
    return round(int(record["rounds"]) / events)


def kept_its_size(results: Results, benchmark: str) -> bool:
    """Whether memory, threads and descriptors were the same at the end of a soak as at its start."""
    record = newest(results, benchmark)
    early, late = record["resources_early"], record["resources_late"]
    return all(late[name] <= GROWTH * early[name] for name in early)


def moments_table(results: Results, benchmark: str) -> str:
    """Validation losses after the rounds since the join, by what the third worker's moments start from."""
    record = newest(results, benchmark)
    rows = []
    for third in record["each"][0]:
        after = zip(*(one[third]["validation"] for one in record["each"]), strict=True)
        rows.append((third, *(f"{statistics.mean(losses):.3f}" for losses in after)))
    return to_table(("third worker", *(f"round {number + 1}" for number in range(len(rows[0]) - 1))), rows)


# --- cost -------------------------------------------------------------------------------------------------


def is_of_these_rounds(results: Results, benchmark: str) -> bool:
    """Whether the cost model was fitted to the rounds that are in the results now."""
    record, exchange = newest(results, benchmark), fit([Measured.of(one) for one in all_of(results, "wan")])
    return (round(record["wire_factor"], 6), round(record["fixed_s"], 6)) == (
        round(exchange.wire_factor, 6),
        round(exchange.fixed_s, 6),
    )


def predictions(results: Results, benchmark: str) -> dict[str, dict[str, dict[str, Record]]]:
    """By model, workers and Mbit/s."""
    found: dict[str, dict[str, dict[str, Record]]] = {}
    for one in newest(results, benchmark)["predictions"]:
        found.setdefault(one["model"], {}).setdefault(str(one["workers"]), {})[str(one["mbit"])] = one
    return found


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


def step_s(results: Results, benchmark: str) -> float:
    """Seconds of a step of the plain loop."""
    record = newest(results, benchmark)
    return float(record["batch_size"] * record["seq_len"] / record["plain_tokens_per_s"])


DERIVED: dict[str, dict[str, Callable[[Results, str], Any]]] = {
    "allreduce": {
        "large": large,
        "small": small,
        "table": allreduce_table,
        "full_table": allreduce_full_table,
        "cpu_shares": cpu_shares,
        "cpu_mbit": cpu_mbit,
    },
    "cost": {
        "at": predictions,
        "table": cost_table,
        "is_of_these_rounds": is_of_these_rounds,
        "worst_error": lambda results, name: max(map(abs, newest(results, name)["held_out_errors"])),
        "hours_per_death": lambda results, name: 1 / newest(results, name)["deaths"],
    },
    "join": {
        "worst_s": lambda results, name: max(newest(results, name)["join_s"]),
        "worst_bytes": lambda results, name: max(newest(results, name)["join_bytes"]),
        "worst_round_s": lambda results, name: max(newest(results, name)["round_while_joining_s"]),
        "replayed_nothing": lambda results, name: not any(newest(results, name)["rounds_replayed"]),
    },
    "kill": {
        "has_same_bits": lambda results, name: all(one["digests"] == 1 for one in newest(results, name)["each"]),
        "resynced": lambda results, name: sum(one["resynced"] for one in newest(results, name)["each"]),
    },
    "moments": {"table": moments_table},
    "soak": {
        "table": soak_table,
        "rounds_per_event": rounds_per_event,
        "kept_its_size": kept_its_size,
        "never_diverged": lambda results, name: not newest(results, name)["divergences"],
        "had_no_problem": lambda results, name: not newest(results, name)["problem"],
    },
    "wan": {
        "int8": by_rate("int8"),
        "fp16": by_rate("fp16"),
        "table": wan_table,
        "is_identical": lambda results, name: all(one["identical"] for one in all_of(results, name)),
    },
    "worker": {
        "step_s": step_s,
        "interval_share": lambda results, name: INTERVAL_SHARE,
        "low": lambda results, name: _ends(results, name, 0),
        "high": lambda results, name: _ends(results, name, 1),
    },
}


def _ends(results: Results, benchmark: str, end: int) -> dict[str, float]:
    record = newest(results, benchmark)
    return {kind: record[f"{kind}_interval"][end] for kind in ("phase", "round")}
