"""Does the swarm survive hundreds of rounds of churn? Workers are killed, frozen, cut off, leave and come back.

What happens is drawn from --seed. After every round the hashes of all workers are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.churn import Churn, Event, Worker, plan
from benchmarks.common import about, run_script, write_lines
from opendiloco.config import Contract
from opendiloco.settings import write_toml

POLL_S = 0.1
STALL_S = 90.0  # without a committed round: the swarm has failed
END_S = 60.0  # for everybody to be at the same place after the last event


@dataclass
class Judgement:
    """What is compared after every round, over all workers."""

    hashes: dict[tuple[int, str], str] = field(default_factory=dict)
    """Hash of the state by round and lineage."""
    divergences: list[str] = field(default_factory=list)
    newest: int = 0
    _seen: Counter[str] = field(default_factory=Counter)

    def look(self, workers: Sequence[Worker]) -> None:
        """Compare the commits that are new."""
        for worker in workers:
            rounds = worker.events("round")
            for event in rounds[self._seen[worker.name] :]:
                if event["verdict"] == "commit":
                    self._compare(worker.name, event)
            self._seen[worker.name] = len(rounds)

    def _compare(self, name: str, event: dict[str, Any]) -> None:
        place = (event["round"], event["lineage"])
        if self.hashes.setdefault(place, event["params_hash"]) != event["params_hash"]:
            self.divergences.append(f"{name} at round {place[0]} of {place[1][:6]}")
        self.newest = max(self.newest, event["round"])


def run(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Let the swarm run through all events; returns the record."""
    contract = out / "run.toml"
    settings = {
        "run": {"id": "soak", "rounds": 1_000_000},
        "data": {"seq_len": 32, "validation_sequences": 2},
        "inner": {"steps": options.steps, "batch_size": 2},
        "rounds": {"start_peers": options.workers, "failure_timeout_s": 3.0},
    }
    write_toml(contract, Contract.model_validate(settings))
    sets = ["compute.threads=1", "swarm.heartbeat_s=1", "swarm.expiry_s=6", "log.every_steps=1000000"]
    sets += ["checkpoint.every_rounds=5", "checkpoint.keep=1"]
    churn = Churn(out, workers=options.workers, contract=contract, sets=sets)
    events = plan(rounds=options.rounds, workers=options.workers, seed=options.seed, every=options.every)
    judgement, resources = Judgement(), list[dict[str, dict[str, float]]]()
    started = time.time()
    try:
        churn.start_all()
        problem = _play(churn, events, judgement, options.rounds, resources)
        churn.read()
        return _record(options, churn, judgement, resources, time.time() - started, problem)
    finally:
        churn.stop()


def _play(
    churn: Churn,
    events: list[Event],
    judgement: Judgement,
    rounds: int,
    resources: list[dict[str, dict[str, float]]],
) -> str:
    """Apply the events as their rounds come; returns what went wrong, or nothing."""
    progress, shown = time.monotonic(), 0
    while judgement.newest < rounds:
        churn.read()
        judgement.look(churn.workers)
        churn.end_pauses()
        while events and events[0].round <= judgement.newest:
            churn.apply(events.pop(0))
        if judgement.newest > shown:
            progress, shown = time.monotonic(), judgement.newest
            if shown % 10 == 0:
                up = sum(worker.is_up for worker in churn.workers)
                print(f"round {shown} of {rounds} | {up} workers up | {len(churn.done)} events", file=sys.stderr)
                resources.append(churn.resources())
        if time.monotonic() - progress > STALL_S:
            return f"no round was committed for {STALL_S:g} s after round {shown}"
        if judgement.divergences:
            return "replicas diverged"
        time.sleep(POLL_S)
    churn.end_pauses(all_of_them=True)
    give_up = time.monotonic() + END_S
    while not _are_together(churn.workers):
        if time.monotonic() > give_up:
            return f"the workers were not at the same place {END_S:g} s after the last round"
        time.sleep(POLL_S)
        churn.read()
        judgement.look(churn.workers)
    return ""


def _are_together(workers: Sequence[Worker]) -> bool:
    """Whether all workers have taken part in one and the same round of late."""
    last = [worker.events("round")[-1] for worker in workers if worker.is_up]
    members = [set(event["participants"]) for event in last if event["verdict"] == "commit"]
    return len(members) == len(workers) and any(len(group) == len(workers) for group in members)


def _record(
    options: argparse.Namespace,
    churn: Churn,
    judgement: Judgement,
    resources: list[dict[str, dict[str, float]]],
    took_s: float,
    problem: str,
) -> dict[str, Any]:
    attempts = [event for worker in churn.workers for event in worker.events("round")]
    commits = sorted((event for event in attempts if event["verdict"] == "commit"), key=lambda event: event["time"])
    joins = [(worker, event) for worker in churn.workers for event in worker.events("join")]
    late = [event for _, event in joins if event["source"] == "swarm"]
    strikes = [at for at, event in churn.done if event.action not in ("start", "leave")]
    recovered = [next((c["time"] - at for c in commits if c["time"] > at), took_s) for at in strikes]
    forks = {place[0] for place in judgement.hashes} if judgement.hashes else set()
    given_up = len(judgement.hashes) - len(forks)
    return {
        "benchmark": "soak",
        "rounds": judgement.newest,
        "seed": options.seed,
        "workers": options.workers,
        "seconds": round(took_s, 1),
        "problem": problem,
        "divergences": judgement.divergences,
        "events": dict(Counter(event.action for _, event in churn.done)),
        "verdicts": dict(Counter(event["verdict"] for event in attempts)),
        "rounds_given_up": given_up,
        "survivors_commit_again_s": _spread(recovered),
        "joins_from_the_swarm": len(late),
        "join_s": _spread([event["seconds_s"] for event in late]),
        "join_bytes": _spread([float(event["received_bytes"]) for event in late]),
        "rounds_until_joiners_took_part": _spread(_until_part(joins)),
        "resources_early": _typical(resources[: len(resources) // 4 or 1]),
        "resources_late": _typical(resources[-(len(resources) // 4 or 1) :]),
    }


def _until_part(joins: Sequence[tuple[Worker, dict[str, Any]]]) -> list[float]:
    """Rounds from the one in which a worker joined to the first that it had a part in, in the same life."""
    found = []
    for worker, join in joins:
        again = min(
            (other["time"] for other in worker.events("join") if other["time"] > join["time"]), default=math.inf
        )
        later = (event for event in worker.events("round") if join["time"] < event["time"] < again)
        first = next((event for event in later if join["peer"] in event["participants"]), None)
        if first is not None and join["source"] == "swarm":
            found.append(float(first["round"] - join["round"]))
    return found


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2), "count": len(values)}


def _typical(samples: Sequence[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Medians over workers and time."""
    one = [values for sample in samples for values in sample.values()]
    return {key: round(statistics.median(values[key] for values in one), 1) for key in one[0]} if one else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the record, keep it; the exit code is 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(prog="benchmarks/soak.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="(default 300)")
    parser.add_argument("--workers", type=int, default=4, metavar="K", help="(default 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what happens (default 0)")
    parser.add_argument("--every", type=int, default=6, metavar="N", help="rounds between two events (default 6)")
    parser.add_argument("--steps", type=int, default=10, metavar="H", help="inner steps of a round (default 10)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines to add the record to")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the workers' folders there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record = run(options, folder)
    record |= about()
    print(json.dumps(record, indent=1))
    if options.out is not None:
        earlier = options.out.read_text().splitlines() if options.out.exists() else []
        write_lines(options.out, [*map(json.loads, earlier), record])
    return 1 if record["problem"] else 0


if __name__ == "__main__":
    run_script("soak", main)
