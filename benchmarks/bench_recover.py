"""What does it take to get to where the swarm is, against what links carry: for a joiner, and after missed rounds?

Workers are processes with a `DiLoCo` optimizer on hosts of their own in network namespaces; they train on and average
meanwhile. A joiner's link is --faster times as fast as a donor's, as downloads at home are, so that several donors can
give it more than one. A worker that misses rounds is stopped (SIGSTOP) until the others have committed that many.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.common import BenchmarkError, about, parse_options, run_script, write_lines
from benchmarks.cost import BYTES_PER_VALUE
from benchmarks.netns import Hosts, why_not
from benchmarks.noise import LIMIT_S, NoiseWorker, start_all, stop_all, wait_for_round

STATE_BYTES = 8
"""Of a value: theta and momentum."""
INNER_S = {"join": 10.0, "missed": 1.0}
"""Seconds of an inner phase."""
QUICK_ROUNDS = 10
"""Before a joiner comes: of a young run it would replay all rounds, which are fewer bytes than the state."""
CODEC = "int8"
SLOWEST = 10
"""Catching up is waited for so many times as long as the link needs for the whole state (and a little)."""
T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str, limit_s: float = LIMIT_S) -> T:
    """What `look` finds, as soon as it finds something."""
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if (found := look()) is not None:
            return found
        time.sleep(0.02)
    raise BenchmarkError(f"{what} has not come within {limit_s:g} s")


def joins(options: argparse.Namespace, values: int, mbit: float, donors: int, folder: Path) -> Iterator[dict[str, Any]]:
    """One worker joins so many others, again and again."""
    joiner_mbit = options.faster * mbit
    with Hosts(donors + 1, mbit=mbit) as network:
        settings: dict[str, Any] = {"values": values, "workers": donors, "inner_s": INNER_S["join"], "codec": CODEC}
        settings["quick_rounds"] = QUICK_ROUNDS
        *workers, joiner = [NoiseWorker(folder / f"worker-{host.number}", host, **settings) for host in network.hosts]
        network.shape(network.hosts[-1], joiner_mbit)
        try:
            start_all(workers)
            while wait_for_round(workers, donors) < QUICK_ROUNDS:
                pass
            addresses = [address for worker in workers for address in worker.addresses]
            found = list[dict[str, Any]]()
            for _ in range(options.repetitions):
                joiner.start(addresses)
                found.append(wait_for(joiner.joined, "a joiner"))
                stop_all([joiner])
        finally:
            stop_all([*workers, joiner])
    seconds = [one["recovery_s"] for one in found]
    yield {
        "kind": "join",
        "inner_s": INNER_S["join"],
        "donors": donors,
        "values": values,
        "mbit": mbit,
        "joiner_mbit": joiner_mbit,
        "seconds": statistics.median(seconds),
        "worst_s": max(seconds),
        "limit_s": STATE_BYTES * values * 8 / (min(joiner_mbit, donors * mbit) * 1e6),
        "received_bytes": statistics.median(one["received_bytes"] for one in found),
        "state_bytes": STATE_BYTES * values,
        "each": found,
    }


def misses(options: argparse.Namespace, mbit: float, folder: Path) -> Iterator[dict[str, Any]]:
    """The last of some workers misses one number of rounds after the other."""
    values, count = max(options.values), options.workers
    state_s = STATE_BYTES * values * 8 / (mbit * 1e6)
    with Hosts(count, mbit=mbit) as network:
        settings: dict[str, Any] = {"values": values, "workers": count, "inner_s": INNER_S["missed"], "codec": CODEC}
        workers = [NoiseWorker(folder / f"worker-{host.number}", host, **settings) for host in network.hosts]
        late = workers[-1]
        try:
            start_all(workers)
            for missed in options.missed:
                way = miss(workers, late, missed, limit_s=LIMIT_S + SLOWEST * state_s)
                needed_bytes = (STATE_BYTES if way["full_state"] else 0) + way["replayed"] * BYTES_PER_VALUE[CODEC]
                yield {
                    "kind": "missed",
                    "inner_s": INNER_S["missed"],
                    "workers": count,
                    "values": values,
                    "mbit": mbit,
                    "limit_s": needed_bytes * values * 8 / (mbit * 1e6),
                    "state_s": state_s,
                    **way,
                }
        finally:
            for worker in workers:
                if hasattr(worker, "popen") and worker.popen.poll() is None:
                    worker.popen.send_signal(signal.SIGCONT)
            stop_all(workers)


def miss(workers: Sequence[NoiseWorker], late: NoiseWorker, missed: int, *, limit_s: float) -> dict[str, Any]:
    """The late one stops for so many rounds of the others, then catches up and takes part again."""
    last, before = wait_for_round(workers, len(workers)), len(late.catch_ups())
    first = workers[0]
    late.popen.send_signal(signal.SIGSTOP)
    wait_for(lambda: True if max(first.commits()) >= last + missed else None, "a round of the others")
    late.popen.send_signal(signal.SIGCONT)
    woken = time.time()
    way = wait_for(lambda: next(iter(late.catch_ups()[before:]), None), "the worker that missed rounds", limit_s)
    again = wait_for_round(workers, len(workers))
    return {
        "missed": way["round"] - last,
        "full_state": way["full_state"],
        "replayed": way["replayed"],
        "seconds": way["recovery_s"],
        "received_bytes": way["received_bytes"],
        "donors": way["donors"],
        "part_again_s": late.commits()[again]["time"] - woken,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep what came out."""
    parser = argparse.ArgumentParser(prog="launch.sh bench recover", description=__doc__)
    parser.add_argument(
        "--values",
        type=int,
        nargs="+",
        default=[500_000, 2_000_000, 8_000_000],
        metavar="N",
        help="parameters (default 500000 2000000 8000000; missed rounds with the most)",
    )
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 20.0], metavar="R", help="(default 100 20)")
    parser.add_argument("--donors", type=int, nargs="+", default=[1, 4], metavar="K", help="(default 1 4)")
    parser.add_argument("--faster", type=float, default=5.0, metavar="X", help="link of a joiner (default 5)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="of a join (default 3)")
    parser.add_argument("--workers", type=int, default=4, metavar="K", help="of which one misses rounds (default 4)")
    parser.add_argument(
        "--missed", type=int, nargs="+", default=[1, 2, 4, 6, 10], metavar="N", help="rounds (default 1 2 4 6 10)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=list(INNER_S), default=list(INNER_S), help="what is measured (default both)"
    )
    small = {"values": [100_000], "mbit": [100.0], "donors": [1], "repetitions": 1, "workers": 3, "missed": [1]}
    options = parse_options(parser, "recover", argv, quick=small)
    if reason := why_not():
        print(f"bench recover: skipped: {reason}", file=sys.stderr)
        return 0
    results, code = list[dict[str, Any]](), 0
    for cell in cells(options):
        try:
            with tempfile.TemporaryDirectory(prefix="recover-") as folder:
                for result in cell(Path(folder)):
                    results.append({"benchmark": "recover", "codec": CODEC, **result, **about()})
                    show(results[-1])
        except BenchmarkError as error:  # the others' results are worth having
            print(f"bench recover: {error}", file=sys.stderr, flush=True)
            code = 1
    write_lines(options.out, results)
    return code


def cells(options: argparse.Namespace) -> Iterator[Callable[[Path], Iterable[dict[str, Any]]]]:
    """All joins, then all missed rounds: each takes a folder."""
    if "join" in options.kinds:
        for mbit, values, donors in product(options.mbit, options.values, options.donors):
            yield partial(joins, options, values, mbit, donors)
    if "missed" in options.kinds:
        for mbit in options.mbit:
            yield partial(misses, options, mbit)


def show(result: dict[str, Any]) -> None:
    """Print a result of `measure`."""
    values, bytes = f"{result['values'] / 1e6:g}M values", f"{result['received_bytes'] / 1e6:.1f} MB"
    if result["kind"] == "join":
        print(
            f"{values} from {result['donors']} donors of {result['mbit']:g} Mbit/s: {result['seconds']:.2f} s (worst "
            f"{result['worst_s']:.2f}; the state alone needs {result['limit_s']:.2f}), {bytes}",
            flush=True,
        )
    else:
        what = "the whole state" if result["full_state"] else f"{result['replayed']} rounds from logs"
        print(
            f"{values}, {result['missed']} rounds missed, {result['mbit']:g} Mbit/s: {what} in "
            f"{result['seconds']:.2f} s (the link needs {result['limit_s']:.2f}, {result['state_s']:.2f} for the whole "
            f"state), {bytes}; took part again after "
            f"{result['part_again_s']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    run_script("bench_recover", main)
