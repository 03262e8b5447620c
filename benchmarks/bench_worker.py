"""What does it cost to be a worker: tokens per second against the same plain PyTorch loop, without peers?

A real `Worker` in a real `Swarm` of its own, and a loop that uses nothing of opendiloco but the model builder and the
token stream: same model, data, optimizer and precision. They take turns of a few steps, so that what else happens on
the machine hits both. "Phase" is all inner steps of a round but the last, "round" includes that one and the end of the
round (alone: no all-reduce), with the evaluation of one sequence. Every round gives a ratio of each; the interval is
where their median lies in 95 % of resamplings.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import about, parse_options, run_script, write_lines
from opendiloco.compute import choose_device
from opendiloco.config import ComputeConfig, Contract, PeerConfig, SwarmConfig
from opendiloco.metrics import MetricsLog
from opendiloco.model import build_model, count_parameters
from opendiloco.optimizers import make_inner_optimizer
from opendiloco.settings import Settings
from opendiloco.swarm import Swarm
from opendiloco.tokenizer import load_tokenizer
from opendiloco.tokens import training_stream
from opendiloco.worker import Worker

BAR = 0.99  # worker over plain, tokens per second within a phase
CORPUS_BYTES = 2_000_000
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Block:
    """Seconds of one round of H steps: all but the last step, and everything."""

    phase_s: float
    whole_s: float


class PlainLoop:
    """What somebody writes who trains alone."""

    def __init__(self, contract: Contract, compute: ComputeConfig) -> None:
        data, inner = contract.data, contract.inner
        self.device = choose_device(compute)
        tokenizer = load_tokenizer(data.tokenizer)
        self.model = build_model(
            contract.model, vocab_size=tokenizer.vocab_size, seq_len=data.seq_len, seed=contract.run.seed
        ).to(self.device)
        self.optimizer = make_inner_optimizer(self.model, inner)
        self.batches = training_stream(data, tokenizer, seed=contract.run.seed, batch_size=inner.batch_size)
        self.micro = compute.micro_batch_size or inner.batch_size
        self.clip_norm, self.dtype = inner.clip_norm, _DTYPES.get(compute.precision)
        self.loss = torch.compile(_loss, dynamic=False) if compute.compile else _loss

    def step(self) -> None:
        """One step. Nothing is logged, so nothing waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens = next(self.batches).to(self.device, non_blocking=True)
        for part in torch.split(tokens, self.micro):
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
                loss = self.loss(self.model, part)
            (loss * (len(part) / len(tokens))).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@contextmanager
def lone_worker(contract: Contract, compute: ComputeConfig, folder: Path) -> Iterator[Worker]:
    """A worker that is the only one of its swarm."""
    settings = Settings(contract, PeerConfig(compute=compute))
    with Swarm(SwarmConfig(), folder) as swarm, MetricsLog(folder / "metrics.jsonl", swarm.peer_id) as metrics:
        swarm.open()
        worker = Worker(settings, swarm, metrics)
        try:
            yield worker
        finally:
            worker.optimizer.finish()


def race(loops: Mapping[str, Callable[[], None]], steps: int, turn: int, device: torch.device) -> dict[str, Block]:
    """One round of each, by turns of `turn` steps; who goes first alternates."""
    order, spent = list(loops), dict.fromkeys(loops, 0.0)
    turns = [*(min(turn, steps - 1 - start) for start in range(0, steps - 1, turn)), 1]
    for count in turns:
        phases = spent.copy()
        for name in order:
            spent[name] += _timed(loops[name], count, device)
        order.reverse()
    return {name: Block(phases[name], spent[name]) for name in loops}


def _timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def interval(ratios: Sequence[float], *, resamplings: int = 2000) -> tuple[float, float]:
    """Where the median lies in 95 % of resamplings (percentile bootstrap, with a seed of its own)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamplings))
    return medians[round(0.025 * resamplings)], medians[round(0.975 * resamplings) - 1]


def measure(contract: Contract, compute: ComputeConfig, folder: Path, *, rounds: int, turn: int) -> dict[str, Any]:
    """Rounds of both; the first does not count. Args: `turn` is the steps of one before the other goes on."""
    steps, device = contract.inner.steps, choose_device(compute)
    plain = PlainLoop(contract, compute)
    with lone_worker(contract, compute, folder) as worker:
        loops = {"plain": plain.step, "worker": worker.step}
        found = [race(loops, steps, turn, device) for _ in range(rounds + 1)]
    pairs = [(blocks["plain"], blocks["worker"]) for blocks in found[1:]]
    tokens = contract.inner.batch_size * contract.data.seq_len
    phases = [plain.phase_s / worker.phase_s for plain, worker in pairs]
    wholes = [plain.whole_s / worker.whole_s for plain, worker in pairs]
    return {
        "parameters": count_parameters(plain.model),
        "plain_tokens_per_s": tokens * steps / statistics.median(plain.whole_s for plain, _ in pairs),
        "worker_tokens_per_s": tokens * (steps - 1) / statistics.median(worker.phase_s for _, worker in pairs),
        "phase_ratio": statistics.median(phases),
        "phase_interval": interval(phases),
        "round_ratio": statistics.median(wholes),
        "round_interval": interval(wholes),
        "phase_ratios": phases,
        "round_ratios": wholes,
        "end_of_round_s": statistics.median(
            (worker.whole_s - worker.phase_s) - worker.phase_s / (steps - 1) for _, worker in pairs
        ),
    }


# --- what both train on --------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, and how."""
    parser.add_argument("--model", default="tiny", help="model.name (default tiny)")
    parser.add_argument("--optimizer", default="adamw", help="inner.optimizer (default adamw)")
    parser.add_argument("--vocabulary", type=int, default=0, metavar="N", help="ids; 0: those of bytes (default)")
    parser.add_argument("--steps", type=int, default=20, metavar="H", help="inner steps of a round (default 20)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences a step (default 8)")
    parser.add_argument("--micro-batch-size", type=int, default=0, metavar="N", help="(default 0: the whole batch)")
    parser.add_argument("--seq-len", type=int, default=128, metavar="N", help="tokens a sequence (default 128)")
    parser.add_argument("--device", default="auto", help="compute.device (default auto)")
    parser.add_argument("--precision", default="fp32", help="compute.precision (default fp32)")
    parser.add_argument("--compile", action="store_true", help="compute.compile")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compute.threads (default 1)")


def contract_of(options: argparse.Namespace, folder: Path, *, rounds: int) -> Contract:
    """The run that the options ask for; its text and tokenizer are written to `folder`."""
    corpus = folder / "corpus.txt"
    write_corpus(corpus)
    tokenizer = "bytes"
    if options.vocabulary:
        tokenizer = str(folder / "tokenizer")
        write_tokenizer(folder / "tokenizer", size=options.vocabulary)
    return Contract.model_validate(
        {
            "run": {"id": "bench-worker", "rounds": rounds},
            "model": {"name": options.model},
            "data": {
                "source": f"text:{corpus}",
                "tokenizer": tokenizer,
                "seq_len": options.seq_len,
                "shards": 4,
                "validation_sequences": 1,
            },
            "inner": {
                "optimizer": options.optimizer,
                "steps": options.steps,
                "batch_size": options.batch_size,
                "schedule": "constant",
            },
        }
    )


def compute_of(options: argparse.Namespace) -> ComputeConfig:
    """How the options want it computed."""
    return ComputeConfig(
        device=options.device,
        precision=options.precision,
        micro_batch_size=options.micro_batch_size,
        compile=options.compile,
        threads=options.threads,
    )


def write_corpus(path: Path) -> None:
    """Source text of Python's standard library, about as much as CORPUS_BYTES."""
    text, size = [], 0
    for file in sorted(Path(argparse.__file__).parent.glob("*.py")):
        text.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(text[-1])
        if size > CORPUS_BYTES:
            break
    path.write_text("\n".join(text))


def write_tokenizer(folder: Path, *, size: int) -> None:
    """A tokenizer of bytes with `size` ids, most of which never occur: for models of the papers' vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    vocabulary |= {f"<{number}>": number for number in range(len(alphabet), size - 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep what came out; the exit code is 0 if the bar holds."""
    parser = argparse.ArgumentParser(prog="launch.sh bench worker", description=__doc__)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="of each (default 40)")
    parser.add_argument("--turn", type=int, default=1, metavar="N", help="steps of one before the other (default 1)")
    options = parse_options(parser, "worker", argv, quick={"rounds": 1, "steps": 2})
    with tempfile.TemporaryDirectory(prefix="worker-") as temporary:
        folder = Path(temporary)
        contract = contract_of(options, folder, rounds=options.rounds + 2)
        result = measure(contract, compute_of(options), folder / "worker", rounds=options.rounds, turn=options.turn)
    asked = {name: value for name, value in vars(options).items() if name not in ("out", "quick")}
    write_lines(options.out, [{"benchmark": "worker", **asked, **result, **about()}])
    show(result)
    return 0 if options.quick or result["phase_ratio"] >= BAR else 1


def show(result: dict[str, Any]) -> None:
    """Print a result of `measure`."""
    print(f"plain loop {result['plain_tokens_per_s']:.0f} tokens/s, worker {result['worker_tokens_per_s']:.0f}")
    for kind in ("phase", "round"):
        low, high = result[f"{kind}_interval"]
        print(f"worker over plain loop, {kind}: {result[f'{kind}_ratio']:.4f} (95 %: {low:.4f} to {high:.4f})")
    print(f"the end of a round takes {1000 * result['end_of_round_s']:.1f} ms")


if __name__ == "__main__":
    run_script("bench_worker", main)
