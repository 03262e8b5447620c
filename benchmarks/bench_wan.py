"""What does a round cost over real, slow links: hosts in network namespaces, links shaped by the kernel?

Every worker is a process with a `DiLoCo` optimizer on a host of its own. Its inner phase is a pause, so that what is
measured is the exchange alone: from the moment the last worker is there (rendezvous included) to the outer step. The
wire limit is what the busiest link carries of payload, by its rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.common import about, parse_options, run_script, write_lines
from benchmarks.netns import Hosts, why_not
from benchmarks.noise import NoiseWorker, start_all, stop_all, wait_for_round

BYTES = {"int8": 1, "fp16": 2}
BARS = {100.0: 0.5, 20.0: 1.5}
"""Seconds per round with int8, by Mbit/s, for 4 workers with 2M parameters."""


def wire_limit_s(values: int, workers: int, codec: str, mbit: float) -> float:
    """Seconds that a butterfly's payload takes one way through one link, both ways at the same time."""
    return 2 * (workers - 1) / workers * values * BYTES[codec] * 8 / (mbit * 1e6)


def measure(options: argparse.Namespace, codec: str, mbit: float, folder: Path) -> dict[str, Any]:
    """Rounds of all workers over links of `mbit`; the first one does not count."""
    with Hosts(options.workers, mbit=mbit) as network:
        workers = [
            NoiseWorker(
                folder / f"worker-{host.number}",
                host,
                values=options.values,
                workers=options.workers,
                inner_s=options.inner,
                codec=codec,
            )
            for host in network.hosts
        ]
        try:
            start_all(workers)
            first = wait_for_round(workers, options.workers)
            carried = [worker.host.carried_bytes for worker in workers]
            last = first
            while last < first + options.rounds:
                last = wait_for_round(workers, options.workers)
            carried = [worker.host.carried_bytes - before for worker, before in zip(workers, carried, strict=True)]
            commits = [worker.commits() for worker in workers]
        finally:
            stop_all(workers)
    rounds = [[of_worker[at] for of_worker in commits if at in of_worker] for at in range(first + 1, last + 1)]
    seconds = [max(line["rendezvous_s"] + line["allreduce_s"] for line in lines) for lines in rounds]
    return {
        "codec": codec,
        "mbit": mbit,
        "round_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "rendezvous_s": statistics.median(max(line["rendezvous_s"] for line in lines) for lines in rounds),
        "wire_limit_s": wire_limit_s(options.values, options.workers, codec, mbit),
        "carried_bytes_per_round": statistics.mean(carried) / len(rounds),
        "rounds": len(rounds),
        "identical": all(len({line["params_hash"] for line in lines}) == 1 for lines in rounds),
        "complete": all(len(lines) == options.workers for lines in rounds),
        "each_s": seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep what came out; the exit code is 0 if the bars hold and replicas are identical."""
    parser = argparse.ArgumentParser(prog="launch.sh bench wan", description=__doc__)
    parser.add_argument("--workers", type=int, default=4, metavar="K", help="(default 4)")
    parser.add_argument("--values", type=int, default=2_000_000, metavar="N", help="parameters (default 2000000)")
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 20.0], metavar="R", help="(default 100 20)")
    parser.add_argument("--codecs", nargs="+", choices=BYTES, default=["int8", "fp16"], help="(default int8 fp16)")
    parser.add_argument("--inner", type=float, default=1.0, metavar="S", help="seconds of an inner phase (default 1)")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="(default 50)")
    small = {"workers": 2, "values": 100_000, "rounds": 3, "inner": 0.2, "mbit": [100.0], "codecs": ["int8"]}
    options = parse_options(parser, "wan", argv, quick=small)
    if reason := why_not():
        print(f"bench wan: skipped: {reason}", file=sys.stderr)
        return 0
    results = []
    for mbit in options.mbit:
        for codec in options.codecs:
            with tempfile.TemporaryDirectory(prefix="wan-") as temporary:
                results.append(measure(options, codec, mbit, Path(temporary)))
            show(results[-1])
    asked = {name: getattr(options, name) for name in ("workers", "values", "inner")}
    write_lines(options.out, [{"benchmark": "wan", **asked, **result, **about()} for result in results])
    return 0 if options.quick or all(_holds(result) for result in results) else 1


def _holds(result: dict[str, Any]) -> bool:
    bar = BARS.get(result["mbit"]) if result["codec"] == "int8" else None
    return bool(result["identical"]) and (bar is None or result["round_s"] <= bar)


def show(result: dict[str, Any]) -> None:
    """Print a result of `measure`."""
    print(
        f"{result['codec']} at {result['mbit']:g} Mbit/s: a round {result['round_s']:.2f} s (median; worst "
        f"{result['worst_s']:.2f}; wire limit {result['wire_limit_s']:.2f}), rendezvous {result['rendezvous_s']:.2f}, "
        f"{result['carried_bytes_per_round'] / 1e6:.2f} MB a link; identical in {result['rounds']} rounds: "
        f"{'yes' if result['identical'] else 'NO'}",
        flush=True,
    )


if __name__ == "__main__":
    run_script("bench_wan", main)
