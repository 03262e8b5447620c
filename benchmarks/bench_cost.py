"""What would a round cost elsewhere? A cost model, checked against measured rounds, for larger models and swarms.

The model of an exchange has two numbers, fitted to the rounds of `bench wan`; that of what it takes to know of each
other grows with the number of workers, and is fitted to `bench dht`. The error is that of each measurement as the
others predict it. What the tables assume stands above them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, BenchmarkError, about, parse_options, run_script, write_lines
from benchmarks.cost import (
    LARGE_FROM,
    Company,
    Exchange,
    Measured,
    Training,
    company_errors,
    fit,
    held_out_errors,
    predict_company,
    utilization,
)

SIZES = {"60M": 60e6, "150M": 150e6, "400M": 400e6, "1B": 1e9, "3B": 3e9, "10B": 10e9}
WORKERS = (2, 8, 32, 128)
MBITS = {20: "20 Mbit/s", 100: "100 Mbit/s", 1_000: "1 Gbit/s", 10_000: "10 Gbit/s"}


def measured_runs(path: Path) -> list[Measured]:
    """The rounds in a file of `bench wan`.

    Raises:
        BenchmarkError: there are too few to fit and to check a model.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    runs = [Measured.of(json.loads(line)) for line in lines]
    if len({run.payload_s for run in runs}) < 3:
        raise BenchmarkError(f"{path} has too few different rounds: run bench wan first")
    return runs


def measured_company(path: Path) -> list[Company]:
    """The numbers of workers in a file of `bench dht`.

    Raises:
        BenchmarkError: there are too few to fit and to check a model.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Company.of(json.loads(line)) for line in lines]
    if len({one.workers for one in found if one.workers >= LARGE_FROM}) < 3:
        raise BenchmarkError(f"{path} has too few different numbers of workers: run bench dht first")
    return found


def predictions(options: argparse.Namespace, exchange: Exchange) -> list[dict[str, Any]]:
    """A record for each size, number of workers and bandwidth."""
    found = []
    for name, parameters in SIZES.items():
        training = Training(parameters, options.steps, options.tokens, options.tflops * 1e12)
        for workers in WORKERS:
            for mbit in MBITS:
                seconds = exchange.seconds(parameters, workers, options.codec, mbit)
                found.append(
                    {
                        "model": name,
                        "workers": workers,
                        "mbit": mbit,
                        "inner_s": training.inner_s,
                        "exchange_s": seconds,
                        "utilization": utilization(
                            training,
                            seconds,
                            workers=workers,
                            deaths_per_hour=options.deaths,
                            recovery_s=options.recovery,
                        ),
                    }
                )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, check, predict, print and keep what came out."""
    parser = argparse.ArgumentParser(prog="launch.sh bench cost", description=__doc__)
    parser.add_argument("--runs", type=Path, metavar="FILE", default=RESULTS / "wan.jsonl", help="of bench wan")
    parser.add_argument("--codec", default="int8", help="int8, fp16 or none (default int8)")
    parser.add_argument("--steps", type=int, default=500, metavar="H", help="inner steps of a round (default 500)")
    parser.add_argument("--tokens", type=int, default=65_536, metavar="N", help="of a worker's step (default 65536)")
    parser.add_argument("--tflops", type=float, default=50.0, metavar="T", help="useful, of a worker (default 50)")
    parser.add_argument("--deaths", type=float, default=0.05, metavar="N", help="of a worker, an hour (default 0.05)")
    parser.add_argument("--recovery", type=float, default=10.0, metavar="S", help="that each costs (default 10)")
    parser.add_argument("--company", type=Path, metavar="FILE", default=RESULTS / "dht.jsonl", help="of bench dht")
    options = parse_options(parser, "cost", argv, quick={})
    runs, company = measured_runs(options.runs), measured_company(options.company)
    exchange, errors, found = fit(runs), held_out_errors(runs), []
    found = predictions(options, exchange)
    asked = {name: getattr(options, name) for name in ("codec", "steps", "tokens", "tflops", "deaths", "recovery")}
    fitted: dict[str, Any] = {"wire_factor": exchange.wire_factor, "fixed_s": exchange.fixed_s}
    fitted |= {"held_out_errors": errors}
    others = [asdict(predict_company(company, workers)) for workers in WORKERS if workers >= LARGE_FROM]
    fitted |= {"company": others, "company_errors": company_errors(company)}
    write_lines(options.out, [{"benchmark": "cost", **asked, **fitted, "predictions": found, **about()}])
    show(options, runs, errors, exchange, found)
    show_company(others, fitted["company_errors"])
    return 0


def show(
    options: argparse.Namespace,
    runs: Sequence[Measured],
    errors: Sequence[float],
    exchange: Exchange,
    found: Sequence[dict[str, Any]],
) -> None:
    """Print the check and the tables."""
    console = Console()
    console.print(f"an exchange takes {exchange.fixed_s:.2f} s and {exchange.wire_factor:.2f} times its payload's time")
    for run, error in zip(runs, errors, strict=True):
        console.print(
            f"{run.codec} at {run.mbit:g} Mbit/s: {run.seconds:.2f} s measured, {run.seconds * (1 + error):.2f} "
            f"predicted from the others ({error:+.0%})",
            highlight=False,
        )
    console.print(
        f"share of all workers' time that trains, and seconds of an exchange; H = {options.steps}, "
        f"{options.tokens:,} tokens a step, {options.tflops:g} useful TFLOP/s, {options.codec}, "
        f"{options.deaths:g} deaths of a worker an hour",
        highlight=False,
    )
    table = Table("model", "phase", "workers")
    for name in MBITS.values():
        table.add_column(name, justify="right", no_wrap=True)
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in found:
        rows.setdefault((one["model"], one["workers"]), []).append(one)
    for (model, workers), cells in rows.items():
        phase = f"{cells[0]['inner_s'] / 60:.1f} min"
        table.add_row(model, phase, str(workers), *(f"{c['utilization']:.0%} {c['exchange_s']:,.0f} s" for c in cells))
    console.print(table)


def show_company(others: Sequence[dict[str, Any]], errors: Sequence[dict[str, float]]) -> None:
    """Print what it takes that there are others."""
    worst = max(abs(error) for of_one in errors for error in of_one.values())
    print(f"that there are others takes, at most {worst:.0%} off where it was measured:")
    for one in others:
        print(
            f"  {one['workers']} workers: {one['standing_bytes_per_s'] / 1e3:.0f} kB/s each, both ways; a round "
            f"{one['round_bytes'] / 1e3:,.0f} kB and {one['round_cpu_s']:.2f} CPU s"
        )


if __name__ == "__main__":
    run_script("bench_cost", main)
