"""The plots of docs/benchmarks.md, as SVG: the same bytes from the same results. matplotlib is loaded to draw only.

What a plot is drawn from, results and code, is in it as a digest: so it can be told without drawing whether it is
out of date, whatever version of matplotlib drew it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cost import Measured
from benchmarks.figures import INTERVAL_SHARE
from benchmarks.records import Record, Results, all_of, large, newest, predictions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#666666",
)
"""Colours that the colour-blind can tell apart (Okabe and Ito)."""
STYLE: dict[str, Any] = {
    "svg.hashsalt": "opendiloco",
    "svg.fonttype": "path",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
}
COST_WORKERS = "32"


@dataclass(frozen=True)
class Plot:
    """One idea."""

    sources: tuple[str, ...]
    """Benchmarks whose results it shows."""
    paint: Callable[[Axes, Results], None]
    size: tuple[float, float] = (6.4, 3.2)
    """Inches."""


def digest_of(plot: Plot, results: Results, code: str) -> str:
    """Of all that a plot is drawn from."""
    shown = json.dumps([results.get(name) for name in plot.sources], sort_keys=True)
    return hashlib.blake2b((shown + code).encode(), digest_size=8).hexdigest()


def digest_in(path: Path) -> str | None:
    """The digest in a plot that has been drawn, if there is one."""
    found = re.search(r"drawn from ([0-9a-f]{16})", path.read_text()) if path.exists() else None
    return found[1] if found else None


def draw(plot: Plot, results: Results, digest: str) -> bytes:
    """A plot as SVG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    image = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # nobody's own settings
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=plot.size, layout="constrained")
        plot.paint(figure.add_subplot(), results)
        metadata: dict[str, Any] = {"Date": None, "Creator": None, "Description": f"drawn from {digest}"}
        figure.savefig(image, format="svg", metadata=metadata)
    lines = image.getvalue().decode().splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines).encode()


# --- one function a plot ----------------------------------------------------------------------------------


def paint_allreduce(axes: Axes, results: Results) -> None:
    """Seconds by system and codec; the thin line goes from the fastest repetition to the slowest."""
    groups = large(results, "allreduce")
    colours = {"opendiloco": BLUE, "hivemind": ORANGE, "gloo": GREY}
    records = [record for of_system in groups.values() for record in of_system.values()]
    for place, record in enumerate(records):
        low, high = record["seconds_min"], record["seconds_max"]
        axes.barh(place, record["seconds"], height=0.62, color=colours.get(record["system"], GREEN))
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        axes.annotate(f"{record['seconds']:.2f}", (high, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(records)), [f"{record['system']} {record['codec']}" for record in records])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.1 * max(record["seconds_max"] for record in records))
    axes.set_xlabel("seconds of a step, rendezvous included (median; line: fastest to slowest)")
    one = records[0]
    axes.set_title(f"All-reduce of {one['values'] / 1e6:g}M values among {one['workers']} workers on one machine")


def paint_wan(axes: Axes, results: Results) -> None:
    """Every round's exchange, their median, and what the payload alone needs."""
    records = all_of(results, "wan")
    for place, record in enumerate(records):
        _ticks(axes, record["each_s"], place, height=0.3, color=SKY, width=1.2, label="a round")
        _ticks(axes, [record["round_s"]], place, height=0.6, color=BLUE, width=2.5, label="median")
        _ticks(axes, [record["wire_limit_s"]], place, height=0.6, color=RED, width=2.5, label="payload alone")
    _rows(axes, [f"{one['codec']}, {one['mbit']:g} Mbit/s" for one in records])
    axes.set_xlim(0)
    axes.set_xlabel("seconds of an exchange, rendezvous included")
    one = records[0]
    axes.set_title(f"{one['workers']} workers exchange {one['values'] / 1e6:g}M values over shaped links")


def paint_kill(axes: Axes, results: Results) -> None:
    """Seconds until all survivors have committed, by when the victim was killed."""
    record = newest(results, "kill")
    each = record["each"]
    axes.plot([100 * one["moved_share"] for one in each], [one["seconds"] for one in each], "o", color=BLUE)
    axes.axhline(record["median_s"], color=ORANGE, linewidth=1.5, zorder=1)
    axes.annotate(
        f"median {record['median_s']:.1f} s", (100, record["median_s"]), (0, 4), textcoords="offset points", ha="right"
    )
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1.15 * record["worst_s"])
    axes.set_xlabel("share of its bytes that the victim had moved when it was killed, %")
    axes.set_ylabel("seconds until all\nothers had committed")
    axes.set_title(
        f"kill -9 of one of {record['workers']} workers at {record['mbit']:g} Mbit/s, {record['trials']} trials"
    )


def paint_worker(axes: Axes, results: Results) -> None:
    """Tokens per second of a worker over those of the plain loop, round by round."""
    record = newest(results, "worker")
    names = {"phase": "within a phase", "round": "with the ends\nof rounds"}
    for place, kind in enumerate(names):
        median, interval, below = record[f"{kind}_ratio"], record[f"{kind}_interval"], place + 0.25
        _ticks(axes, record[f"{kind}_ratios"], place, height=0.3, color=SKY, width=1.5, label="a round")
        axes.plot(
            interval, [below, below], color=BLUE, linewidth=2, label=f"{INTERVAL_SHARE:.0%} interval of the median"
        )
        axes.plot([median], [below], "D", color=BLUE, markersize=6, label="median")
        axes.annotate(f"{median:.3f}", (interval[1], below), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color="black", linewidth=1)
    _rows(axes, list(names.values()))
    axes.set_xlabel("tokens per second, worker over plain PyTorch loop")
    axes.set_title(
        f"What being a worker costs ({record['model']}, {record['rounds']} rounds of {record['steps']} steps)"
    )


def paint_cost(axes: Axes, results: Results) -> None:
    """Share of the time that trains, by bandwidth and size of the model."""
    record, looks = (
        newest(results, "cost"),
        ((SKY, "o"), (BLUE, "s"), (GREEN, "D"), (ORANGE, "^"), (RED, "v"), (PURPLE, "P")),
    )
    shares = list[float]()
    for (model, by_workers), (colour, marker) in zip(predictions(results, "cost").items(), looks, strict=False):
        cells = by_workers[COST_WORKERS].values()
        shares += [one["utilization"] for one in cells]
        mbits, percent = [one["mbit"] for one in cells], [100 * one["utilization"] for one in cells]
        axes.plot(mbits, percent, color=colour, marker=marker, markersize=5, label=model)
    axes.set_xscale("log")
    axes.set_xticks([20, 100, 1_000, 10_000], ["20 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
    axes.minorticks_off()
    axes.set_ylim(10 * math.floor(10 * min(shares)), 101)
    axes.set_xlabel("bandwidth of each worker's link, each way")
    axes.set_ylabel("share of all workers' time\nthat trains, %")
    axes.set_title(f"{COST_WORKERS} workers, {record['codec']}, H = {record['steps']} (predicted)")
    axes.legend(title="parameters", loc="lower right", ncols=2)


def paint_prediction(axes: Axes, results: Results) -> None:
    """Every measured exchange and what the others predict for it."""
    runs, errors = [Measured.of(one) for one in all_of(results, "wan")], newest(results, "cost")["held_out_errors"]
    for place, (run, error) in enumerate(zip(runs, errors, strict=True)):
        predicted = run.seconds * (1 + error)
        axes.plot([run.seconds], [place], "o", color=BLUE, markersize=8, label="measured")
        axes.plot([predicted], [place], "D", color=ORANGE, markersize=5, label="predicted from the others")
        end = (max(run.seconds, predicted), place)
        axes.annotate(f"{round(error, 2) + 0:+.0%}", end, (9, 0), textcoords="offset points", va="center")
    _rows(axes, [f"{run.codec}, {run.mbit:g} Mbit/s" for run in runs])
    axes.set_xlim(0, 1.15 * max(run.seconds for run in runs))
    axes.set_xlabel("seconds of an exchange")
    axes.set_title("The cost model against the rounds that it was not fitted to")


def paint_losses(choose: Callable[[Iterable[float]], float]) -> Callable[[Axes, Results], None]:
    """Validation loss of every training system by time, at one of the rates."""

    def paint(axes: Axes, results: Results) -> None:
        records = all_of(results, "train")
        mbit = choose(record["mbit"] for record in records)
        looks = zip((BLUE, SKY, ORANGE, GREEN, RED, GREY), "osD^vP", strict=True)
        for record, (colour, marker) in zip((one for one in records if one["mbit"] == mbit), looks, strict=False):
            if not record["rounds"]:
                continue
            each = record["each"]
            minutes = [0.0, *(seconds / 60 for seconds in itertools.accumulate(each["seconds"]))]
            label = f"{record['system']} {record['codec']}"
            every = max(1, len(minutes) // 8)
            axes.plot(minutes, each["loss"], color=colour, marker=marker, markevery=every, markersize=4, label=label)
        axes.axhline(records[0]["target_loss"], color="black", linewidth=0.8)
        axes.set_xlabel("minutes of training")
        axes.set_ylabel("validation loss, nats")
        axes.set_xlim(0)
        axes.set_title(f"{records[0]['workers']} workers at {mbit:g} Mbit/s each")
        axes.legend()

    return paint


def paint_recover(axes: Axes, results: Results) -> None:
    """Seconds of every recovery by what its link needs."""
    records = all_of(results, "recover")
    marks = zip(sorted({one["donors"] for one in records if one["kind"] == "join"}), (SKY, BLUE, PURPLE), strict=False)
    looks = {f"a joiner, {count} donor{'s' * (count > 1)}": (colour, "o") for count, colour in marks}
    looks |= {"missed rounds, from logs": (GREEN, "s"), "missed rounds, the whole state": (ORANGE, "D")}
    for name, (colour, marker) in looks.items():
        shown = [one for one in records if _way(one) == name]
        if shown:
            limits, seconds = [one["limit_s"] for one in shown], [one["seconds"] for one in shown]
            axes.plot(limits, seconds, marker, color=colour, markersize=6, label=name)
    ends = [min(one["limit_s"] for one in records), max(one["limit_s"] for one in records)]
    axes.plot(ends, ends, color="black", linewidth=1, zorder=1, label="what the links need")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("seconds that the links need for the bytes")
    axes.set_ylabel("seconds that it took")
    axes.set_title("Getting to where the swarm is, against the links")
    axes.legend()


def _way(record: Record) -> str:
    """How a worker got to where the swarm is."""
    if record["kind"] == "join":
        return f"a joiner, {record['donors']} donor{'s' * (record['donors'] > 1)}"
    return f"missed rounds, {'the whole state' if record['full_state'] else 'from logs'}"


def _ticks(
    axes: Axes, values: Sequence[float], place: float, *, height: float, color: str, width: float, label: str
) -> None:
    """An upright tick for each value, all of them one path: many of them stay a small file."""
    across = [at for value in values for at in (value, value, math.nan)]
    upright = [place - height / 2, place + height / 2, math.nan] * len(values)
    axes.plot(across, upright, color=color, linewidth=width, label=label)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Names for what was drawn at 0, 1, 2 ... downwards, and a legend in which every label stands once."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.5)
    axes.grid(visible=False, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=len(once))


PLOTS: dict[str, Plot] = {
    "allreduce": Plot(("allreduce",), paint_allreduce),
    "wan": Plot(("wan",), paint_wan),
    "kill": Plot(("kill",), paint_kill),
    "worker": Plot(("worker",), paint_worker, size=(6.4, 3.0)),
    "train-fast": Plot(("train",), paint_losses(max), size=(6.4, 4.0)),
    "train-slow": Plot(("train",), paint_losses(min), size=(6.4, 4.0)),
    "recover": Plot(("recover",), paint_recover, size=(6.4, 4.0)),
    "cost": Plot(("cost",), paint_cost, size=(6.4, 4.0)),
    "prediction": Plot(("wan", "cost"), paint_prediction, size=(6.4, 2.9)),
}
