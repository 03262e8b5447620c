"""Does it all work on a GPU: two workers on one device over loopback, and a worker's speed against the plain loop?

Made for one machine with a CUDA GPU and a few minutes (150m, bf16, torch.compile, adamw8bit). Elsewhere
`--device cpu --model tiny --optimizer adamw --precision fp32 --vocabulary 0 --seq-len 64 --no-compile` shows that the
script itself works.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

import torch

from benchmarks.bench_worker import add_options, compute_of, contract_of, measure, show
from benchmarks.common import BenchmarkError, about, run_script, write_lines
from opendiloco.config import CheckpointConfig, Contract, LogConfig, PeerConfig
from opendiloco.metrics import read_metrics
from opendiloco.processes import Process, Processes
from opendiloco.settings import write_toml

LIMIT_S = 240.0  # for two workers to start, compile, train and end


def train_together(contract: Contract, peer: PeerConfig, folder: Path) -> dict[str, Any]:
    """Two `opendiloco train` processes on the same device, to the end of the run."""
    folder.mkdir()
    write_toml(folder / "run.toml", contract)
    write_toml(folder / "peer.toml", peer)
    common = ["train", "--peer", str(folder / "peer.toml")]
    addresses = folder / "first.addr"
    processes = Processes(folder)
    try:
        arguments = [*common, "--run", str(folder / "run.toml")]
        first = processes.start("first", [*arguments, "--address-file", str(addresses)])
        _wait(lambda: addresses.is_file() or not first.is_running, [first])
        if not first.is_running:
            raise BenchmarkError(f"{first.name} worker {first.end}:\n{first.output[-3000:]}")
        second = processes.start("second", [*arguments, "--peers", *addresses.read_text().split()])
        both = [first, second]
        _wait(lambda: not any(process.is_running for process in both), both)
    finally:
        processes.stop()
    for process in both:
        if process.popen.returncode != 0:
            raise BenchmarkError(f"{process.name} worker {process.end}:\n{process.output[-3000:]}")
    return _compare(contract, [read_metrics(process.folder / "metrics.jsonl") for process in both])


def _compare(contract: Contract, workers: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What the metrics of both say about replicas, loss and speed."""
    rounds = [
        [line for line in events if line["event"] == "round" and line["verdict"] == "commit"] for events in workers
    ]
    hashes = [[line["params_hash"] for line in of_worker] for of_worker in rounds]
    losses = [line["loss"] for line in workers[0] if line["event"] == "eval"]
    return {
        "rounds": [len(of_worker) for of_worker in rounds],
        "identical": hashes[0] == hashes[1] and len(hashes[0]) == contract.run.rounds,
        "participants": [len(line["participants"]) for line in rounds[0]],
        "validation": losses,
        "tokens_per_s_together": sum(of_worker[-1]["tokens"] / of_worker[-1]["inner_s"] for of_worker in rounds),
        "last_round": {name: rounds[0][-1][name] for name in ("inner_s", "wait_s", "allreduce_s", "outer_s", "codec")},
    }


def _wait(done: Callable[[], bool], processes: Sequence[Process]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > give_up:
            tails = "\n".join(f"{process.name}:\n{process.output[-1500:]}" for process in processes)
            raise BenchmarkError(f"not done after {LIMIT_S:g} s\n{tails}")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, print and keep what came out; the exit code is 0 if replicas are identical and learn."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of two workers (default 3)")
    parser.add_argument("--blocks", type=int, default=6, metavar="N", help="of each loop (default 6)")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="takes the result, a JSON line")
    parser.set_defaults(
        model="150m",
        optimizer="adamw8bit",
        vocabulary=32_000,
        batch_size=16,
        seq_len=1024,
        device="cuda",
        precision="bf16",
        compile=True,
    )
    options = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        folder = Path(temporary)
        contract = contract_of(options, folder, rounds=options.rounds)
        contract = contract.model_copy(update={"rounds": contract.rounds.model_copy(update={"start_peers": 2})})
        peer = PeerConfig(
            compute=compute_of(options), checkpoint=CheckpointConfig(every_rounds=0), log=LogConfig(every_steps=5)
        )
        together = train_together(contract, peer, folder / "together")
        print(
            f"two workers, {together['rounds']} rounds: replicas identical: {'yes' if together['identical'] else 'no'}"
        )
        print(f"validation loss {' '.join(f'{loss:.3f}' for loss in together['validation'])}")
        print(f"together {together['tokens_per_s_together']:.0f} tokens/s", flush=True)
        alone = contract_of(options, folder, rounds=options.blocks + 2)
        speed = measure(alone, compute_of(options), folder / "alone", rounds=options.blocks, turn=options.steps)
        show(speed)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    record = {"benchmark": "gpu_check", **asked, "gpu": device, "together": together, "speed": speed, **about()}
    write_lines(options.out, [{**record, "seconds": time.monotonic() - started}])
    return 0 if together["identical"] and together["validation"][-1] < together["validation"][0] else 1


if __name__ == "__main__":
    run_script("gpu_check", main)
