"""How soon do the others have committed when a worker is killed in the middle of an all-reduce over slow links?

Every worker is a process with a `DiLoCo` optimizer behind a link of its own; kill -9 comes once the victim has moved a
random part of its bytes. Measured is the time until the last survivor has committed that round.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
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

BAR_S = 10.0
INNER_S = 1.0
MBIT = 1e6 / 8


def trial(workers: list[NoiseWorker], draw: random.Random, bytes_per_round: int) -> dict[str, Any]:
    """Kill one worker in the middle of an all-reduce, wait for the others, and start it again."""
    round = wait_for_round(workers, len(workers)) + 1
    victim = draw.choice(workers)
    survivors = [worker for worker in workers if worker is not victim]
    share, before = draw.uniform(0.05, 0.95), victim.host.carried_bytes
    give_up = time.monotonic() + LIMIT_S
    while victim.host.carried_bytes < before + share * bytes_per_round:
        if time.monotonic() > give_up:
            raise BenchmarkError("the victim's all-reduce does not begin")
        time.sleep(0.005)
    os.kill(victim.popen.pid, signal.SIGKILL)
    killed = time.time()
    victim.popen.wait()
    while not all(max(worker.commits()) >= round for worker in survivors) and time.time() < killed + LIMIT_S:
        time.sleep(0.02)
    commits = [worker.commits() for worker in survivors]
    lines = [of_worker[min(at for at in of_worker if at >= round)] for of_worker in commits if max(of_worker) >= round]
    own = [of_worker[round] for of_worker in commits if round in of_worker]  # others took it from a member's log
    victim.start([address for worker in survivors for address in worker.addresses])
    return {
        "moved_share": share,
        "seconds": max(line["time"] for line in lines) - killed if len(lines) == len(survivors) else LIMIT_S,
        "resynced": len(survivors) - len(own),
        "participants": sorted({len(line["participants"]) for line in own}),
        "digests": len({line["digest"] for line in own}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, print and keep what came out; the exit code is 0 if the bar holds."""
    parser = argparse.ArgumentParser(prog="launch.sh bench kill", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="(default 20)")
    parser.add_argument("--workers", type=int, default=4, metavar="K", help="(default 4)")
    parser.add_argument("--values", type=int, default=2_000_000, metavar="N", help="parameters (default 2000000)")
    parser.add_argument("--mbit", type=float, default=20.0, metavar="R", help="of each link, each way (default 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments (default 0)")
    options = parse_options(parser, "kill", argv, quick={"trials": 1, "workers": 3, "values": 200_000})
    draw, links, trials = random.Random(options.seed), Links(), list[dict[str, Any]]()
    moved = 4 * options.values * (options.workers - 1) // options.workers  # both ways, int8
    with tempfile.TemporaryDirectory(prefix="kill-") as temporary:
        settings = {"values": options.values, "workers": options.workers, "inner_s": INNER_S}
        workers = [
            NoiseWorker(Path(temporary, f"worker-{index}"), links.host(rate=options.mbit * MBIT), **settings)
            for index in range(options.workers)
        ]
        try:
            start_all(workers)
            for number in range(options.trials):
                trials.append(trial(workers, draw, moved))
                print(f"trial {number + 1}: {trials[-1]}", file=sys.stderr, flush=True)
        finally:
            stop_all(workers)
            links.close()
    seconds = [one["seconds"] for one in trials]
    within = sum(one["seconds"] <= BAR_S and one["digests"] == 1 for one in trials)
    record = {
        "benchmark": "kill",
        **{name: getattr(options, name) for name in ("trials", "workers", "values", "mbit", "seed")},
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "within_bar": within,
        "each": trials,
        **about(),
    }
    write_lines(options.out, [record])
    print(f"survivors had committed after {record['median_s']:.1f} s (median), {record['worst_s']:.1f} s at worst")
    print(f"{within} of {options.trials} within {BAR_S:g} s")
    return 0 if options.quick or within == options.trials else 1


if __name__ == "__main__":
    run_script("bench_kill", main)
