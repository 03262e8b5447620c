"""Tables of what was measured over links: rounds, training, recovery, and what knowing of each other takes."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.records import NoSourceError, Record, Results, all_of, newest
from benchmarks.tables import to_table

SLOW_LINK_BITS = 20e6


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


def train_table(results: Results, benchmark: str) -> str:
    """A system and rate a row."""
    header = (
        "",
        "tokens/s",
        "in steps",
        "bytes a token",
        "beside the steps of a round, median s",
        "worst s",
        "payload alone s",
        "loss at the end",
        "fixed loss after s",
        "rounds with equal replicas",
    )
    rows = list[tuple[str, ...]]()
    for record in all_of(results, benchmark):
        failed = ", then it failed" if record["failed"] and record["rounds"] else ""
        name = f"{record['system']} {record['codec']}, {record['mbit']:g} Mbit/s{failed}"
        if not record["rounds"]:
            rows.append((name, "did not run", *["-"] * (len(header) - 2)))
            continue
        reached_s = record["loss_reached_s"]
        rows.append(
            (
                name,
                f"{record['tokens_per_s']:,.0f}",
                f"{record['utilization']:.0%}",
                f"{record['bytes_per_token']:,.0f}",
                f"{record['round_s']:.2f}",
                f"{record['worst_s']:.2f}",
                f"{record['wire_limit_s']:.2f}",
                f"{record['loss']:.3f}",
                "not reached" if reached_s is None else f"{reached_s:.0f}",
                f"{record['identical_rounds']} of {record['rounds']}",
            )
        )
    return to_table(header, rows)


def train_short_table(results: Results, benchmark: str) -> str:
    """A system a row, with what it comes to at each rate."""
    records = all_of(results, benchmark)
    rates = sorted({record["mbit"] for record in records}, reverse=True)
    by_system: dict[str, dict[float, Record]] = {}
    for record in records:
        by_system.setdefault(f"{record['system']} {record['codec']}", {})[record["mbit"]] = record
    header = ["", *(f"{rate:g} Mbit/s: tokens/s, s to loss {records[0]['target_loss']:g}" for rate in rates)]
    rows = [
        (name, *(_speed_and_time(of_rate[rate]) if rate in of_rate else "-" for rate in rates), _sameness(of_rate))
        for name, of_rate in by_system.items()
    ]
    return to_table([*header, "rounds with equal replicas"], rows)


def _speed_and_time(record: Record) -> str:
    if not record["rounds"]:
        return "did not run"
    reached_s = record["loss_reached_s"]
    return f"{record['tokens_per_s']:,.0f}, {'not reached' if reached_s is None else f'{reached_s:.0f}'}"


def _sameness(records: Mapping[float, Record]) -> str:
    rounds = sum(record["rounds"] for record in records.values())
    return f"{sum(record.get('identical_rounds', 0) for record in records.values())} of {rounds}"


def recoveries(results: Results, benchmark: str, kind: str) -> list[Record]:
    """Those of joiners ("join"), or those after missed rounds ("missed"), at least one."""
    found = [record for record in all_of(results, benchmark) if record["kind"] == kind]
    if not found:
        raise NoSourceError(benchmark, f"has no record of kind {kind}")
    return found


def recover_joins_table(results: Results, benchmark: str) -> str:
    """A rate, size and number of donors a row."""
    header = (
        "parameters, state",
        "donors",
        "links, theirs and the joiner's",
        "state there after, median s",
        "worst s",
        "the links need s",
        "MB that came",
    )
    rows = [
        (
            f"{record['values'] / 1e6:g}M, {record['state_bytes'] / 1e6:.1f} MB",
            str(record["donors"]),
            f"{record['mbit']:g} and {record['joiner_mbit']:g} Mbit/s",
            f"{record['seconds']:.2f}",
            f"{record['worst_s']:.2f}",
            f"{record['limit_s']:.2f}",
            f"{record['received_bytes'] / 1e6:.1f}",
        )
        for record in recoveries(results, benchmark, "join")
    ]
    return to_table(header, rows)


def recover_missed_table(results: Results, benchmark: str) -> str:
    """A rate and number of missed rounds a row."""
    header = (
        "rounds missed, link",
        "how",
        "caught up after s",
        "the link needs s",
        "for the whole state s",
        "MB that came",
        "took part again after s",
    )
    rows = [
        (
            f"{record['missed']}, {record['mbit']:g} Mbit/s",
            "the whole state" if record["full_state"] else f"{record['replayed']} from logs",
            f"{record['seconds']:.2f}",
            f"{record['limit_s']:.2f}",
            f"{record['state_s']:.2f}",
            f"{record['received_bytes'] / 1e6:.1f}",
            f"{record['part_again_s']:.1f}",
        )
        for record in recoveries(results, benchmark, "missed")
    ]
    return to_table(header, rows)


def company_table(results: Results, benchmark: str) -> str:
    """Of the cost model: a number of workers a row."""
    header = (
        "workers",
        "being there, kB/s each, both ways",
        "of a link of 20 Mbit/s",
        "a round, kB each",
        "CPU s each",
    )
    rows = [
        (
            str(one["workers"]),
            f"{one['standing_bytes_per_s'] / 1e3:.0f}",
            f"{one['standing_bytes_per_s'] / 2 * 8 / SLOW_LINK_BITS:.1%}".replace("%", " %"),
            f"{one['round_bytes'] / 1e3:,.0f}",
            f"{one['round_cpu_s']:.2f}",
        )
        for one in newest(results, benchmark)["company"]
    ]
    return to_table(header, rows)


def dht_table(results: Results, benchmark: str) -> str:
    """A number of workers a row."""
    header = (
        "workers",
        "being there, kB/s each, both ways",
        "of a core",
        "a round, kB each",
        "CPU s each",
        "rendezvous, median s",
        "worst s",
    )
    rows = [
        (
            str(record["workers"]),
            f"{record['standing_bytes_per_s'] / 1e3:.2f}",
            f"{record['standing_cpu_share']:.1%}".replace("%", " %"),
            f"{record['round_bytes'] / 1e3:.0f}",
            f"{record['round_cpu_s']:.2f}",
            f"{record['rendezvous_s']:.2f}",
            f"{record['worst_rendezvous_s']:.2f}",
        )
        for record in all_of(results, benchmark)
    ]
    return to_table(header, rows)
