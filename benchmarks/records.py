"""The records that benchmarks have written, and choices among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Results = Mapping[str, Sequence[Record]]
"""Records by benchmark, in the order in which they were written."""


class NoSourceError(Exception):
    """Nothing in the results says this; the message names the benchmark and what it lacks."""

    def __init__(self, benchmark: str, lacks: str) -> None:
        super().__init__(lacks)
        self.benchmark = benchmark


def newest(results: Results, benchmark: str) -> Record:
    """The record written last."""
    return all_of(results, benchmark)[-1]


def all_of(results: Results, benchmark: str) -> Sequence[Record]:
    """All records of a benchmark, at least one."""
    if not results.get(benchmark):
        raise NoSourceError(benchmark, "has no record")
    return results[benchmark]


def large(results: Results, benchmark: str) -> dict[str, dict[str, Record]]:
    """Records of the largest group and vector, by system and codec."""
    records = all_of(results, benchmark)
    size = max((record["workers"], record["values"]) for record in records)
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if (record["workers"], record["values"]) == size:
            found.setdefault(record["system"], {})[record["codec"]] = record
    return found


def predictions(results: Results, benchmark: str) -> dict[str, dict[str, dict[str, Record]]]:
    """By model, workers and Mbit/s."""
    found: dict[str, dict[str, dict[str, Record]]] = {}
    for one in newest(results, benchmark)["predictions"]:
        found.setdefault(one["model"], {}).setdefault(str(one["workers"]), {})[str(one["mbit"])] = one
    return found
