"""What the quality benchmark found, group by group, beside what was published: tables, and whether the two agree. Pure.

Everything is compared seed by seed: the difference of two cells counts where it has the same sign in all seeds and is
not tiny.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

from benchmarks.quality import GROUPS, Group, Row, cells_of
from benchmarks.records import Record, Results, all_of
from benchmarks.tables import to_table

TINY = 0.005
"""Relative difference of perplexities below which they count as equal, here and in what was published."""

Losses = dict[int, float]
"""Of a cell, by seed."""


def losses_of(records: Sequence[Record], cell: str) -> Losses:
    """Validation losses of a cell by seed; empty where it has not been measured."""
    return {record["seed"]: float(record["loss"]) for record in records if record["cell"] == cell}


def relative(losses: Losses, reference: Losses) -> list[float]:
    """Perplexity relative to the reference's, less 1, of each seed that both have."""
    return [math.expm1(losses[seed] - reference[seed]) for seed in sorted(losses.keys() & reference.keys())]


def sign(differences: Sequence[float]) -> int:
    """Of relative differences: 0 where seeds disagree or it is tiny."""
    if not differences or abs(statistics.mean(differences)) < TINY:
        return 0
    return 1 if min(differences) > 0 else -1 if max(differences) < 0 else 0


def judgement(differences: Sequence[float], published: float) -> str:
    """How relative differences of a row to the reference go with the published one."""
    ours, theirs = sign(differences), sign([published])
    if ours == theirs:
        return "agrees"
    if theirs == 0:
        return "differs, none published"
    return "no difference here" if ours == 0 else "does not agree"


def published_difference(group: Group, row: Row) -> float | None:
    """Relative to the group's reference, less 1."""
    reference = group.rows[0].published
    if row is group.rows[0] or row.published is None or reference is None:
        return None
    return row.published / reference - 1


def table(records: Sequence[Record], name: str) -> str:
    """A row of the group a line: loss, perplexity relative to the first row, the published one."""
    group = GROUPS[name]
    reference = losses_of(records, group.rows[0].cell)
    lines = []
    for row in group.rows:
        losses, published = losses_of(records, row.cell), published_difference(group, row)
        differences = relative(losses, reference) if row is not group.rows[0] else []
        lines.append(
            (
                row.label or row.cell,
                _loss(list(losses.values())),
                f"{statistics.mean(differences):+.1%} ({min(differences):+.1%} to {max(differences):+.1%})"
                if differences
                else "",
                f"{published:+.1%}" if published is not None else "",
                judgement(differences, published) if published is not None and differences else "",
            )
        )
    return to_table(("", "validation loss, nats", "perplexity (all seeds)", "published", ""), lines)


def trend(records: Sequence[Record], name: str) -> tuple[int, int, int]:
    """Pairs of a group's rows: those in the published order of perplexities, in the other one, without a difference."""
    group = GROUPS[name]
    found = [(row.at, losses) for row in group.rows if row.at is not None and (losses := losses_of(records, row.cell))]
    pairs = [
        sign(relative(second, first))
        for (low, first), (high, second) in combinations(sorted(found, key=lambda one: one[0]), 2)
        if low < high
    ]
    return pairs.count(group.trend), pairs.count(-group.trend), pairs.count(0)


def trends(results: Results, benchmark: str) -> dict[str, bool]:
    """Of each group with a published trend, whether it is here, too, by and large."""
    records = newest_records(results, benchmark)
    found = {name: trend(records, name) for name, group in GROUPS.items() if group.trend}
    return {name: along > 2 * against for name, (along, against, _) in found.items()}


def trend_sentence(records: Sequence[Record], name: str) -> str:
    """Whether perplexity goes along the group as published; empty where nothing is said of a trend."""
    group = GROUPS[name]
    if not group.trend:
        return ""
    along, against, neither = trend(records, name)
    verb = "rises" if group.trend > 0 else "falls"
    if not along and not against:
        answer = "no pair of rows differs"
    elif not against:
        answer = "it does here as well"
    else:
        answer = "so it does here by and large" if along > 2 * against else "it does not here"
    return (
        f"Published: perplexity {verb} with {group.along}; {answer} ({along + against + neither} pairs of rows: "
        f"{along} in this order, {against} in the other, {neither} without a difference)."
    )


def group_report(records: Sequence[Record], name: str) -> str:
    """The table of a group, where the published figures are from, and the sentence about its trend."""
    parts = [table(records, name), f"Published: {GROUPS[name].source}.", trend_sentence(records, name)]
    return "\n\n".join(part for part in parts if part)


def newest_records(results: Results, benchmark: str) -> list[Record]:
    """Those of the same size as the one written last."""
    records = all_of(results, benchmark)
    return [record for record in records if record["size"] == records[-1]["size"]]


def report(results: Results, benchmark: str) -> str:
    """The reports of all groups, each below its question."""
    records = newest_records(results, benchmark)
    return "\n\n".join(f"### {group.question}\n\n{group_report(records, name)}" for name, group in GROUPS.items())


def seeds(results: Results, benchmark: str) -> int:
    """How many there are of every cell."""
    found: dict[str, set[int]] = {cell: set() for cell in cells_of(list(GROUPS))}
    for record in newest_records(results, benchmark):
        found.setdefault(record["cell"], set()).add(record["seed"])
    return min(map(len, found.values()))


def agreement(results: Results, benchmark: str) -> dict[str, int]:
    """How many rows with a published difference there are, and how many agree with it."""
    records = newest_records(results, benchmark)
    found = []
    for group in GROUPS.values():
        for row in group.rows:
            published = published_difference(group, row)
            differences = relative(losses_of(records, row.cell), losses_of(records, group.rows[0].cell))
            if published is not None and differences:
                found.append(judgement(differences, published))
    return {"rows": len(found), "agree": found.count("agrees"), "opposite": found.count("does not agree")}


def above(results: Results, benchmark: str, reference: str) -> dict[str, float]:
    """Perplexity of each cell over that of `reference`, less 1: mean of the seeds."""
    records = newest_records(results, benchmark)
    found = {cell: relative(losses_of(records, cell), losses_of(records, reference)) for cell in cells_of(list(GROUPS))}
    return {cell: statistics.mean(differences) for cell, differences in found.items() if differences}


def below(results: Results, benchmark: str, reference: str) -> dict[str, float]:
    """The same with the other sign."""
    return {cell: -difference for cell, difference in above(results, benchmark, reference).items()}


def _loss(losses: Sequence[float]) -> str:
    if not losses:
        return "not measured"
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.3f}{spread}"
