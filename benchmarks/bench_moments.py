"""What shall a joiner's AdamW moments start from: zero, or those of a worker that is there (inner.joiner_moments)?

Two workers train for some rounds. Then they go on by themselves, with a third one whose moments are zero, and with one
that has a donor's: from the same parameters, on the same text. All in one process (`opendiloco.simulate`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

import torch

from benchmarks.common import about, parse_options, run_script, write_lines
from opendiloco.checkpoint import Checkpoint, CheckpointWriter, load_checkpoint
from opendiloco.codec import get_codec
from opendiloco.config import CheckpointConfig, ComputeConfig, Contract, PeerConfig
from opendiloco.metrics import MetricsLog, read_metrics
from opendiloco.settings import Settings
from opendiloco.simulated import SimulatedGroup
from opendiloco.worker import Worker

FIRST = ("a", "b")


def contract_of(options: argparse.Namespace, seed: int, rounds: int) -> Contract:
    """A run of tiny models on the standard library's source text."""
    return Contract.model_validate(
        {
            "run": {"id": "moments", "rounds": rounds, "seed": seed},
            "data": {"seq_len": 64, "validation_sequences": options.validation},
            "inner": {"steps": options.steps, "batch_size": 4, "warmup_steps": 20, "schedule": "constant"},
        }
    )


def train(contract: Contract, folder: Path, checkpoints: Mapping[str, Checkpoint | None], *, every: int = 0) -> None:
    """Train one worker per name from its checkpoint; `every` so many rounds it writes one."""
    group = SimulatedGroup(list(checkpoints), get_codec(contract.outer.codec))
    peer = PeerConfig(compute=ComputeConfig(threads=1), checkpoint=CheckpointConfig(every_rounds=every))

    def work(name: str) -> None:
        out = folder / name
        out.mkdir(parents=True)
        writer = CheckpointWriter(out / "checkpoints", keep=1)
        with MetricsLog(out / "metrics.jsonl", name) as metrics:
            start = checkpoints[name]
            Worker(Settings(contract, peer), group.member(name), metrics, checkpoint=start, writer=writer).train()
        writer.close()

    with ThreadPoolExecutor(len(checkpoints)) as threads:
        list(threads.map(work, checkpoints))


def joiner(donor: Checkpoint, moments: str) -> Checkpoint:
    """Where a worker starts that has fetched the state: text of its own, and moments or none."""
    inner = donor.inner if moments == "donor" else {**donor.inner, "state": {}}
    return replace(
        donor,
        inner=inner,
        data={**donor.data, "sources": [{**part, "has_begun": False} for part in donor.data["sources"]]},
    )


def measure(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Validation losses after the join, by what the third worker starts from."""
    rounds = options.before + options.after
    contract = contract_of(options, seed, rounds)
    first = folder / "first"
    train(contract_of(options, seed, options.before), first, dict.fromkeys(FIRST), every=options.before)
    digest = contract_of(options, seed, options.before).digest
    there = {name: load_checkpoint("latest", first / name, contract=digest) for name in FIRST}
    donor = there[FIRST[0]]
    assert donor is not None
    found = {}
    for third in ("nobody", "zero", "donor"):
        workers = there if third == "nobody" else {**there, "c": joiner(donor, third)}
        train(contract, folder / third, workers)
        events = {name: read_metrics(folder / third / name / "metrics.jsonl") for name in workers}
        ends = {name: [event for event in of_worker if event["event"] == "round"] for name, of_worker in events.items()}
        found[third] = {
            "validation": [event["loss"] for event in events[FIRST[0]] if event["event"] == "eval"][1:],
            "first_phase_loss": {name: of_worker[0]["loss"] for name, of_worker in ends.items()},
            "first_pseudo_gradient": {name: of_worker[0]["pseudo_gradient_norm"] for name, of_worker in ends.items()},
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep what came out."""
    parser = argparse.ArgumentParser(prog="launch.sh bench moments", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--before", type=int, default=4, metavar="N", help="rounds before the join (default 4)")
    parser.add_argument("--after", type=int, default=4, metavar="N", help="rounds after it (default 4)")
    parser.add_argument("--steps", type=int, default=50, metavar="H", help="inner steps of a round (default 50)")
    parser.add_argument("--validation", type=int, default=256, metavar="N", help="sequences (default 256)")
    small = {"seeds": 1, "before": 1, "after": 1, "steps": 2, "validation": 4}
    options = parse_options(parser, "moments", argv, quick=small)
    torch.set_num_threads(1)
    results = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory(prefix="moments-") as temporary:
            results.append(measure(options, seed, Path(temporary)))
    record = {
        "benchmark": "moments",
        **{name: getattr(options, name) for name in ("seeds", "before", "after", "steps", "validation")},
        "each": results,
        **about(),
    }
    write_lines(options.out, [record])
    for third in results[0]:
        losses = [[result[third]["validation"][index] for result in results] for index in range(options.after)]
        shown = " ".join(f"{statistics.mean(each):.3f}" for each in losses)
        print(f"third worker: {third:<7} validation loss after the rounds since: {shown}")
    return 0


if __name__ == "__main__":
    run_script("bench_moments", main)
