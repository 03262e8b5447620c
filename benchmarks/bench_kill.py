"""How soon do the others have committed when a worker is killed in the middle of an all-reduce over slow links?

Every worker is a process with a `DiLoCo` optimizer behind a link of its own; kill -9 comes once the victim has moved a
random part of its bytes. Measured is the time until the last survivor has committed that round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.common import ROOT, BenchmarkError, commit, machine, versions, write_lines
from benchmarks.links import Host, Links

BAR_S = 10.0
LIMIT_S = 120.0
PAUSE_S = 1.0  # an inner phase
MBIT = 1e6 / 8


# --- a worker --------------------------------------------------------------------------------------------


def work(folder: Path, values: int, workers: int, host: dict[str, Any], peers: list[str]) -> None:
    """Train on noise for ever; a line of JSON per attempt at a round goes to standard output."""
    import torch

    from opendiloco import Contract, DiLoCo, InnerConfig, RoundReport, RoundsConfig, RunConfig, Swarm, SwarmConfig

    torch.set_num_threads(1)
    contract = Contract(
        run=RunConfig(id="kill", rounds=1_000_000),
        inner=InnerConfig(steps=1),
        rounds=RoundsConfig(start_peers=workers),
    )
    model = torch.nn.Linear(1000, values // 1000, bias=False)
    torch.nn.init.zeros_(model.weight)

    def tell(report: RoundReport) -> None:
        outcome = report.outcome
        line = {"round": report.round, "verdict": outcome.verdict, "digest": outcome.digest, "time": time.time()}
        print(json.dumps({**line, "participants": len(outcome.weights), "reason": outcome.reason}), flush=True)

    with Swarm(SwarmConfig(peers=tuple(peers), **host), folder) as swarm:
        swarm.open()
        (folder / "addresses").write_text("\n".join(swarm.addresses))
        optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=1e-3), model, swarm, contract, on_round=tell)
        print(json.dumps({"round": optimizer.round, "verdict": "join", "time": time.time()}), flush=True)
        while True:
            time.sleep(PAUSE_S)
            model.weight.grad = torch.randn_like(model.weight)
            optimizer.step()


# --- the trials ------------------------------------------------------------------------------------------


class Worker:
    """One worker over all its lives, as the benchmark sees it."""

    def __init__(self, folder: Path, host: Host, options: argparse.Namespace) -> None:
        self.host, self._folder, self._options = host, folder, options
        folder.mkdir()

    def start(self, peers: Sequence[str]) -> None:
        """Start its process, again with its old key and address."""
        arguments = [str(self._folder), str(self._options.values), str(self._options.workers)]
        arguments += [json.dumps(self.host.settings), *peers]
        with (self._folder / "lines.jsonl").open("wb") as out, (self._folder / "errors.txt").open("ab") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, __file__, "--work", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def addresses(self) -> list[str]:
        path = self._folder / "addresses"
        return path.read_text().split() if path.exists() else []

    def lines(self) -> list[dict[str, Any]]:
        """What it has said in this life."""
        if self.popen.poll() is not None:
            raise BenchmarkError(f"{self._folder.name} ended: {(self._folder / 'errors.txt').read_text()[-500:]}")
        text = (self._folder / "lines.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def commits(self) -> dict[int, dict[str, Any]]:
        return {line["round"]: line for line in self.lines() if line["verdict"] == "commit"}


def wait_for(workers: Sequence[Worker], participants: int) -> int:
    """Wait until all of them have committed one new round with so many participants; returns it."""
    before = max(max(worker.commits(), default=0) for worker in workers)
    give_up = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up:
        commits = [worker.commits() for worker in workers]
        for round in sorted(set.intersection(*(set(of_worker) for of_worker in commits)) - set(range(before + 1))):
            if all(of_worker[round]["participants"] == participants for of_worker in commits):
                return round
        time.sleep(0.05)
    raise BenchmarkError(f"no round of {participants} workers within {LIMIT_S:g} s")


def trial(workers: list[Worker], draw: random.Random, bytes_per_round: int) -> dict[str, Any]:
    """Kill one worker in the middle of an all-reduce, wait for the others, and start it again."""
    round = wait_for(workers, len(workers)) + 1
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
        "participants": sorted({line["participants"] for line in own}),
        "digests": len({line["digest"] for line in own}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, print and keep what came out; the exit code is 0 if the bar holds."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--work"]:
        work(Path(arguments[1]), int(arguments[2]), int(arguments[3]), json.loads(arguments[4]), arguments[5:])
    parser = argparse.ArgumentParser(prog="launch.sh bench kill", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="(default 20)")
    parser.add_argument("--workers", type=int, default=4, metavar="K", help="(default 4)")
    parser.add_argument("--values", type=int, default=2_000_000, metavar="N", help="parameters (default 2000000)")
    parser.add_argument("--mbit", type=float, default=20.0, metavar="R", help="of each link, each way (default 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", default=ROOT / "benchmarks" / "results" / "kill.jsonl")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves in order, too
    draw, links, trials = random.Random(options.seed), Links(), list[dict[str, Any]]()
    moved = 4 * options.values * (options.workers - 1) // options.workers  # both ways, int8
    with tempfile.TemporaryDirectory(prefix="kill-") as temporary:
        workers = [
            Worker(Path(temporary, f"worker-{index}"), links.host(rate=options.mbit * MBIT), options)
            for index in range(options.workers)
        ]
        try:
            workers[0].start([])
            while not workers[0].addresses:
                workers[0].lines()
                time.sleep(0.1)
            for worker in workers[1:]:
                worker.start(workers[0].addresses)
            for number in range(options.trials):
                trials.append(trial(workers, draw, moved))
                print(f"trial {number + 1}: {trials[-1]}", file=sys.stderr, flush=True)
        finally:
            for worker in workers:
                worker.popen.terminate()
            for worker in workers:
                worker.popen.wait()
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
        "machine": machine(),
        "versions": versions("torch", "hivemind", "opendiloco-p2p"),
        "commit": commit(),
    }
    write_lines(options.out, [record])
    print(f"survivors had committed after {record['median_s']:.1f} s (median), {record['worst_s']:.1f} s at worst")
    print(f"{within} of {options.trials} within {BAR_S:g} s")
    return 0 if within == options.trials else 1


if __name__ == "__main__":
    sys.exit(main())
