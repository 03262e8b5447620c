"""What does it take that workers know of each other and meet, by their number?

Every worker is a process with a `DiLoCo` optimizer on a host of its own in a network namespace. The model is tiny and
an inner phase is a pause, so that what they spend goes into the DHT, the records of each other and the rendezvous. More
and more of them join one run. All of them share this machine's cores: a rendezvous of many takes longer here than where
each has a machine of its own, which is why CPU seconds stand beside the times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.common import about, cpu_of, parse_options, run_script, write_lines
from benchmarks.netns import Hosts, why_not
from benchmarks.noise import NoiseWorker, start_all, stop_all, wait_for_round

VALUES = 1_000
QUIET_S = 2.0
"""After a round and before the next one: what a round causes is over, or has not begun."""

START_LIMIT_S = 600.0


@dataclass(frozen=True)
class Reading:
    """What all workers together have used so far."""

    time: float
    carried_bytes: int
    """By all links, both ways."""
    cpu_s: Mapping[str, float]
    """By kind of process."""

    @classmethod
    def of(cls, workers: Sequence[NoiseWorker]) -> Reading:
        """Now."""
        used = [cpu_of(worker.popen.pid) for worker in workers]
        cpu = {kind: sum(each.get(kind, 0.0) for each in used) for kind in sorted(set().union(*used))}
        return cls(time.monotonic(), sum(worker.host.carried_bytes for worker in workers), cpu)


@dataclass
class Use:
    """Sums of differences of readings."""

    seconds: float = 0.0
    carried_bytes: int = 0
    cpu_s: float = 0.0

    def add(self, before: Reading, after: Reading) -> None:
        """Count what lies between two readings."""
        self.seconds += after.time - before.time
        self.carried_bytes += after.carried_bytes - before.carried_bytes
        self.cpu_s += sum(after.cpu_s.values()) - sum(before.cpu_s.values())


def measure(workers: Sequence[NoiseWorker], rounds: int, inner_s: float) -> dict[str, Any]:
    """Some rounds of workers that are all there: what it takes to be there, and what a round takes."""
    count = len(workers)
    first = last = wait_for_round(workers, count, limit_s=START_LIMIT_S)
    standing, whole, begun = Use(), Use(), Reading.of(workers)
    for _ in range(rounds):
        time.sleep(QUIET_S)
        before = Reading.of(workers)
        time.sleep(inner_s - 2 * QUIET_S - (before.time - begun.time))
        standing.add(before, Reading.of(workers))
        last = wait_for_round(workers, count)
        ended = Reading.of(workers)
        whole.add(begun, ended)
        begun = ended
    commits = [worker.commits() for worker in workers]
    lines = [[of_worker[at] for of_worker in commits if at in of_worker] for at in range(first + 1, last + 1)]
    waits = [max(line["rendezvous_s"] for line in each) for each in lines]
    return {
        "workers": count,
        "rounds": len(lines),
        "rendezvous_s": statistics.median(waits),
        "worst_rendezvous_s": max(waits),
        "allreduce_s": statistics.median(max(line["allreduce_s"] for line in each) for each in lines),
        "standing_bytes_per_s": standing.carried_bytes / standing.seconds / count,
        "standing_cpu_share": standing.cpu_s / standing.seconds / count,
        "round_bytes": _beyond(whole.carried_bytes, standing.carried_bytes, whole, standing) / len(lines) / count,
        "round_cpu_s": _beyond(whole.cpu_s, standing.cpu_s, whole, standing) / len(lines) / count,
        "identical": all(len({line["params_hash"] for line in each}) == 1 for each in lines),
        "complete": all(len(each) == count == len(each[0]["participants"]) for each in lines),
    }


def _beyond(total: float, resting: float, whole: Use, standing: Use) -> float:
    """Of a total, what is more than resting for so long would have taken."""
    return max(0.0, total - resting * whole.seconds / standing.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep what came out; the exit code is 0 if all rounds were whole and replicas identical."""
    parser = argparse.ArgumentParser(prog="launch.sh bench dht", description=__doc__)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32], metavar="K", help="(default 2 4 8 16 32)"
    )
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="with each number (default 6)")
    parser.add_argument("--inner", type=float, default=15.0, metavar="S", help="seconds of a phase (default 15)")
    options = parse_options(parser, "dht", argv, quick={"workers": [2, 3], "rounds": 1, "inner": 8.0})
    counts = sorted(set(options.workers))
    if counts[0] < 2 or options.rounds < 1 or options.inner < 4 * QUIET_S:
        parser.error(f"--workers takes numbers of at least 2, --rounds of at least 1, --inner of {4 * QUIET_S:g}")
    if reason := why_not():
        print(f"bench dht: skipped: {reason}", file=sys.stderr)
        return 0
    results = []
    with Hosts(counts[-1]) as network, tempfile.TemporaryDirectory(prefix="dht-") as folder:
        settings: dict[str, Any] = {"values": VALUES, "workers": counts[0], "inner_s": options.inner, "codec": "int8"}
        workers = [NoiseWorker(Path(folder, f"worker-{host.number}"), host, **settings) for host in network.hosts]
        there = counts[0]
        try:
            start_all(workers[:there])
            for count in counts:
                for worker in workers[there:count]:
                    worker.start(workers[0].addresses)
                there = count
                result = measure(workers[:count], options.rounds, options.inner)
                results.append({"benchmark": "dht", "inner": options.inner, "values": VALUES, **result, **about()})
                show(results[-1])
        finally:
            stop_all(workers)
    write_lines(options.out, results)
    return 0 if all(result["identical"] and result["complete"] for result in results) else 1


def show(result: dict[str, Any]) -> None:
    """Print a result of `measure`."""
    print(
        f"{result['workers']} workers: being there takes {result['standing_bytes_per_s'] / 1e3:.2f} kB/s and "
        f"{result['standing_cpu_share']:.1%} of a core each; a round {result['round_bytes'] / 1e3:.1f} kB and "
        f"{result['round_cpu_s']:.3f} CPU s each; rendezvous {result['rendezvous_s']:.2f} s (median of "
        f"{result['rounds']}; worst {result['worst_rendezvous_s']:.2f}), all-reduce {result['allreduce_s']:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    run_script("bench_dht", main)
