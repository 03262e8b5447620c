"""The plots of the quality benchmark: the way down, and each group beside what was published."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.plots import BLUE, GREEN, GREY, ORANGE, RED, SKY, Plot
from benchmarks.quality import GROUPS
from benchmarks.quality_tables import losses_of, newest_records, published_difference, relative
from benchmarks.records import NoSourceError, Record, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {"one worker": GREY, "8x batch": ORANGE, "DiLoCo": BLUE, "8x updates": GREEN}


def paint_curves(axes: Axes, results: Results) -> None:
    """Validation loss by tokens: mean over the seeds, from the least to the greatest."""
    records = newest_records(results, "quality")
    for cell, colour in CURVES.items():
        tokens, low, mean, high = curve_of(records, cell)
        axes.plot(tokens, mean, color=colour, marker="o", markersize=3, label=cell)
        axes.fill_between(tokens, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("tokens that all workers have trained on")
    axes.set_ylabel("validation loss, nats")
    axes.set_title("DiLoCo and what it is compared to")
    axes.legend()


def curve_of(records: Sequence[Record], cell: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Of a cell, after its start: tokens, and the least, the mean and the greatest loss of the seeds there.

    Raises:
        NoSourceError: it has not been measured.
    """
    curves = [record["curve"][1:] for record in records if record["cell"] == cell]
    if not curves:
        raise NoSourceError("quality", f"has no record of {cell}")
    points = list(zip(*curves, strict=True))
    losses = [[point[2] for point in each] for each in points]
    tokens = [float(each[0][1]) for each in points]
    return tokens, [min(each) for each in losses], [statistics.mean(each) for each in losses], [max(x) for x in losses]


def paint_group(name: str, *, title: str) -> Callable[[Axes, Results], None]:
    """Paints perplexity relative to the first row of a group: each seed, their mean, and what was published."""

    def paint(axes: Axes, results: Results) -> None:
        records, group = newest_records(results, "quality"), GROUPS[name]
        reference = losses_of(records, group.rows[0].cell)
        rows = sorted(group.rows, key=lambda row: (row.at is None, row.at or 0.0))
        for place, row in enumerate(rows):
            percent = [100 * each for each in relative(losses_of(records, row.cell), reference)]
            if not percent:
                raise NoSourceError("quality", f"has no record of {row.cell}")
            axes.plot(percent, [place] * len(percent), "|", color=SKY, markersize=13, label="a seed")
            axes.plot([statistics.mean(percent)], [place], "D", color=BLUE, markersize=6, label="mean")
            if (published := published_difference(group, row)) is not None:
                axes.plot([100 * published], [place], "x", color=RED, markersize=7, label="published")
        axes.axvline(0.0, color="black", linewidth=1, zorder=1)
        axes.set_yticks(range(len(rows)), [row.label or row.cell for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        axes.figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=len(once))
        first = group.rows[0]
        axes.set_xlabel(f"perplexity against {first.label or first.cell}, %")
        axes.set_title(title)

    return paint


QUALITY_PLOTS: dict[str, Plot] = {
    "quality": Plot(("quality",), paint_curves, size=(6.4, 3.6)),
    "quality-steps": Plot(("quality",), paint_group("steps", title="How rarely workers average")),
    "quality-workers": Plot(("quality",), paint_group("workers", title="How many workers there are")),
    "quality-losses": Plot(("quality",), paint_group("losses", title="Pseudo-gradients that come too late")),
}
