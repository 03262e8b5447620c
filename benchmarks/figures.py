"""What the documents say of the results: a value for every placeholder, from the newest record of a benchmark. Pure.

`kill.median_s` is a field of the newest record in `results/kill.jsonl`, `soak.join_s.median` a field of a field. Beside
them stand the values in `DERIVED`, which follow from records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import network_tables, quality_tables, tables
from benchmarks.cost import LARGE_FROM, Company, Measured, fit, predict_company
from benchmarks.records import NoSourceError, Record, Results, all_of, large, newest, predictions

INTERVAL_SHARE = 0.95
"""Of `bench_worker.interval`."""
"""Of memory: what counts as the same. Threads and descriptors may be one more at a look."""


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


def small(results: Results, benchmark: str) -> Record:
    """A record of the smallest group and vector."""
    return min(all_of(results, benchmark), key=lambda record: (record["workers"], record["values"]))


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


def by_rate(codec: str) -> Callable[[Results, str], dict[str, Record]]:
    """A codec's rounds over the fastest and the slowest links."""

    def choose(results: Results, benchmark: str) -> dict[str, Record]:
        records = sorted(
            (record for record in all_of(results, benchmark) if record["codec"] == codec), key=lambda one: one["mbit"]
        )
        return {"fastest": records[-1], "slowest": records[0]}

    return choose


def rounds_per_event(results: Results, benchmark: str) -> int:
    """Of a soak, rounded."""
    record = newest(results, benchmark)
    events: int = sum(record["events"].values())
    return round(int(record["rounds"]) / events)


def kept_its_count(results: Results, benchmark: str) -> bool:
    """Whether threads and descriptors were at most one more at the end of a soak than at its start."""
    record = newest(results, benchmark)
    early, late = record["resources_early"], record["resources_late"]
    return all(late[name] <= early[name] + 1 for name in ("threads", "descriptors"))


def is_of_these_rounds(results: Results, benchmark: str) -> bool:
    """Whether the cost model was fitted to the rounds that are in the results now."""
    record, exchange = newest(results, benchmark), fit([Measured.of(one) for one in all_of(results, "wan")])
    return (round(record["wire_factor"], 6), round(record["fixed_s"], 6)) == (
        round(exchange.wire_factor, 6),
        round(exchange.fixed_s, 6),
    )


def is_of_this_company(results: Results, benchmark: str) -> bool:
    """Whether the cost model was fitted to the numbers of workers that are in the results now."""
    measured = [Company.of(one) for one in all_of(results, "dht")]
    written = [Company.of(one) for one in newest(results, benchmark)["company"]]
    found = [predict_company(measured, one.workers) for one in written]
    return [round(one.round_bytes, 3) for one in written] == [round(one.round_bytes, 3) for one in found]


def step_s(results: Results, benchmark: str) -> float:
    """Seconds of a step of the plain loop."""
    record = newest(results, benchmark)
    return float(record["batch_size"] * record["seq_len"] / record["plain_tokens_per_s"])


def _ends(results: Results, benchmark: str, end: int) -> dict[str, float]:
    record = newest(results, benchmark)
    return {kind: record[f"{kind}_interval"][end] for kind in ("phase", "round")}


COMMON: dict[str, Callable[[Results, str], Any]] = {"origin": tables.origin}
"""Of all benchmarks."""
DERIVED: dict[str, dict[str, Callable[[Results, str], Any]]] = {
    "allreduce": {
        "large": large,
        "small": small,
        "table": tables.allreduce_table,
        "full_table": tables.allreduce_full_table,
        "cpu_shares": cpu_shares,
        "cpu_mbit": cpu_mbit,
    },
    "cost": {
        "at": predictions,
        "table": tables.cost_table,
        "company_table": network_tables.company_table,
        "is_of_this_company": is_of_this_company,
        "large_from": lambda results, name: LARGE_FROM,
        "worst_company_error": lambda results, name: max(
            abs(error) for of_one in newest(results, name)["company_errors"] for error in of_one.values()
        ),
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
    "moments": {"table": tables.moments_table},
    "quality": {
        "report": quality_tables.report,
        "seeds": quality_tables.seeds,
        "agreement": quality_tables.agreement,
        "trends": quality_tables.trends,
        "below_one_worker": lambda results, name: quality_tables.below(results, name, "one worker"),
        "above_diloco": lambda results, name: quality_tables.above(results, name, "DiLoCo"),
    },
    "dht": {"table": network_tables.dht_table},
    "recover": {
        "join": lambda results, name: network_tables.recoveries(results, name, "join")[0],
        "missed": lambda results, name: network_tables.recoveries(results, name, "missed")[0],
        "joins_table": network_tables.recover_joins_table,
        "missed_table": network_tables.recover_missed_table,
    },
    "soak": {
        "table": tables.soak_table,
        "rounds_per_event": rounds_per_event,
        "kept_its_count": kept_its_count,
        "never_diverged": lambda results, name: not newest(results, name)["divergences"],
        "had_no_problem": lambda results, name: not newest(results, name)["problem"],
    },
    "train": {"table": network_tables.train_table, "short_table": network_tables.train_short_table},
    "wan": {
        "int8": by_rate("int8"),
        "fp16": by_rate("fp16"),
        "table": network_tables.wan_table,
        "is_identical": lambda results, name: all(one["identical"] for one in all_of(results, name)),
    },
    "worker": {
        "step_s": step_s,
        "interval_share": lambda results, name: INTERVAL_SHARE,
        "low": lambda results, name: _ends(results, name, 0),
        "high": lambda results, name: _ends(results, name, 1),
    },
}
