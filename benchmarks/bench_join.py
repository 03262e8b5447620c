"""What does it cost a swarm that others join: their time and bytes, the rounds of those who are there, donors' memory?

Every worker is a process with a `DiLoCo` optimizer behind a link of its own. After some rounds of the first workers by
themselves several others join at once. Rounds that end while they are on their way are set against the ones before, up
to the one that the last of them ends with a vote.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.common import BenchmarkError, about, parse_options, run_script, write_lines
from benchmarks.links import Links
from benchmarks.noise import LIMIT_S, NoiseWorker, start_all, stop_all, wait_for_round

BAR = 1.1  # rounds while others join, over rounds before
MBIT = 1e6 / 8


def wait_until_joined(joiners: Sequence[NoiseWorker]) -> list[dict[str, Any]]:
    """How each of them joined, once all of them have had a vote in a round."""
    give_up = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up:
        joins = [joiner.joined() for joiner in joiners]
        if all(
            join is not None and any(join["peer"] in line["participants"] for line in joiner.commits().values())
            for joiner, join in zip(joiners, joins, strict=True)
        ):
            return [join for join in joins if join is not None]
        time.sleep(0.05)
    raise BenchmarkError(f"the joiners have no vote after {LIMIT_S:g} s")


def lengths(worker: NoiseWorker, rounds: Sequence[int]) -> list[float]:
    """Seconds from the end of the round before to the end of each of these rounds."""
    commits = worker.commits()
    return [commits[at]["time"] - commits[at - 1]["time"] for at in rounds if at in commits and at - 1 in commits]


def measure(options: argparse.Namespace, links: Links, folder: Path) -> dict[str, Any]:
    """One run: the first workers by themselves, then the joiners."""
    settings = {"values": options.values, "workers": options.workers, "inner_s": options.inner}
    everybody = [
        NoiseWorker(folder / f"worker-{index}", links.host(rate=options.mbit * MBIT), **settings)
        for index in range(options.workers + options.joiners)
    ]
    workers, joiners = everybody[: options.workers], everybody[options.workers :]
    try:
        start_all(workers)
        first = wait_for_round(workers, options.workers)
        while max(workers[0].commits()) < first + options.rounds:
            time.sleep(0.1)
        alone = range(first + 1, max(workers[0].commits()) + 1)
        memory = [worker.peak_bytes() for worker in workers]
        addresses = [address for worker in workers for address in worker.addresses]
        for joiner in joiners:
            joiner.start(addresses)
        joins = wait_until_joined(joiners)
        last = wait_for_round(everybody, len(everybody))
        joining = range(alone.stop, last + 1)
        after = [worker.peak_bytes() for worker in workers]
        commits = workers[0].commits()
        before_s, while_s = (lengths(workers[0], rounds) for rounds in (alone, joining))
        return {
            "round_s": statistics.median(before_s),
            "round_while_joining_s": while_s,
            "allreduce_s": statistics.median(commits[at]["allreduce_s"] for at in alone),
            "allreduce_while_joining_s": [commits[at]["allreduce_s"] for at in joining],
            "ratio": statistics.mean(while_s) / statistics.mean(before_s),
            "join_s": [join["seconds"] for join in joins],
            "join_bytes": [join["received_bytes"] for join in joins],
            "state_bytes": 8 * options.values,
            "rounds_replayed": [join["replayed"] for join in joins],
            "model_bytes": 4 * options.values,
            "peak_bytes": {name: max(peaks[name] for peaks in memory) for name in memory[0]},
            "peak_growth_bytes": {
                name: max(late[name] - early[name] for early, late in zip(memory, after, strict=True))
                for name in memory[0]
            },
        }
    finally:
        stop_all(everybody)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep what came out; the exit code is 0 if the bar holds."""
    parser = argparse.ArgumentParser(prog="launch.sh bench join", description=__doc__)
    parser.add_argument("--workers", type=int, default=4, metavar="K", help="that are there first (default 4)")
    parser.add_argument("--joiners", type=int, default=4, metavar="K", help="that come at once (default 4)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="before they come (default 8)")
    parser.add_argument("--values", type=int, default=2_000_000, metavar="N", help="parameters (default 2000000)")
    parser.add_argument("--inner", type=float, default=10.0, metavar="S", help="seconds of an inner phase (default 10)")
    parser.add_argument("--mbit", type=float, default=20.0, metavar="R", help="of each link, each way (default 20)")
    options = parse_options(
        parser,
        "join",
        argv,
        quick={"workers": 2, "joiners": 1, "rounds": 2, "values": 100_000, "inner": 1.0, "mbit": 100.0},
    )
    links = Links()
    try:
        with tempfile.TemporaryDirectory(prefix="join-") as temporary:
            result = measure(options, links, Path(temporary))
    finally:
        links.close()
    record = {
        "benchmark": "join",
        **{name: getattr(options, name) for name in ("workers", "joiners", "values", "inner", "mbit")},
        **result,
        **about(),
    }
    write_lines(options.out, [record])
    print(f"joined after {max(result['join_s']):.1f} s at worst, {max(result['join_bytes']) / 1e6:.1f} MB each")
    print(f"rounds meanwhile take {result['ratio']:.2f} times as long as before ({result['round_s']:.1f} s)")
    growth = (result["peak_growth_bytes"]["network"] - result["state_bytes"]) / 1e6
    print(f"donors' network processes had {growth:+.1f} MB at peak beyond the shared state, which they then have read")
    return 0 if options.quick or result["ratio"] <= BAR else 1


if __name__ == "__main__":
    run_script("bench_join", main)
