"""Runs a cell of the quality benchmark, as a `PeerProcess`: text, model and contract of it, and what came out."""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import answer_calls
from benchmarks.quality import CELLS, Cell, Size
from opendiloco.config import ComputeConfig, Contract
from opendiloco.evaluate import validation_loss
from opendiloco.metrics import read_metrics
from opendiloco.simulate import simulate
from opendiloco.tokenizer import load_tokenizer
from opendiloco.tokens import validation_batches
from opendiloco.worker import Worker

KINDS = {
    "tables": ("encodings",),
    "prose": ("pydoc_data",),
    "editor": ("idlelib",),
    "windows": ("tkinter", "turtledemo", "curses"),
    "concurrency": ("asyncio", "multiprocessing", "concurrent"),
    "tools": ("unittest", "distutils", "lib2to3", "importlib", "ctypes", "logging", "json", "sqlite3", "ensurepip"),
    "internet": ("email", "http", "urllib", "xml", "html", "xmlrpc", "wsgiref"),
    "modules": (".",),
}
"""Folders of the standard library whose text is of one kind; `.` is its files beside them."""
SKIPPED = {"test", "tests", "idle_test", "__pycache__"}
DOCUMENT_BYTES = 1_000
COMPUTE = ComputeConfig(device="cpu", threads=1)


class Runner:
    """Runs cells one after the other, each in a thread: a call must not take long."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: dict[str, Any] | Exception | None = None

    def start(self, name: str, seed: int, size: dict[str, Any]) -> None:
        """Begin a cell."""
        self._result = None

        def work() -> None:
            try:
                self._result = run_cell(CELLS[name], Size(**size), seed)
            except Exception as error:  # whoever waits gets it
                self._result = error

        self._thread = threading.Thread(target=work, name=name)
        self._thread.start()

    def wait(self, seconds_s: float) -> dict[str, Any] | None:
        """What came out, or None if it is not over within that time."""
        assert self._thread is not None
        self._thread.join(seconds_s)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def run_cell(cell: Cell, size: Size, seed: int) -> dict[str, Any]:
    """Train as the cell says; the validation loss of the outer parameters on the way and at the end."""
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quality-") as temporary:
        folder = Path(temporary)
        text = write_text(folder / "text", size)
        write_model(folder / "config", size)
        model = {"name": f"hf:{folder / 'config'}"}
        if steps := cell.pretraining_steps(size):
            before = Cell(1, is_plain=True, inner_steps=steps, settings={"inner.schedule": "constant"})
            contract = contract_of(before, size, seed, model=model, rounds=1, text=text)
            (worker,) = simulate(contract, COMPUTE, ["pretraining"], folder / "before")
            worker.save(folder / "pretrained")
            model["start"] = str(folder / "pretrained")
        contract = contract_of(cell, size, seed, model=model, rounds=cell.rounds(size), text=text)
        names = cell.names()
        kinds = sorted(KINDS)
        sources = {name: f"text:{text / kinds[index % len(kinds)]}" for index, name in enumerate(names)}
        workers = simulate(
            contract,
            COMPUTE,
            names,
            folder / "run",
            plan=cell.plan(size, seed),
            sources=sources if cell.by_kind else None,
        )
        whole = [worker for worker in workers if worker.optimizer.round == contract.run.rounds]
        events = {name: list(read_metrics(folder / "run" / name / "metrics.jsonl")) for name in names}
        return {
            **outcome_of(events, contract, evaluates=not cell.by_kind, before=steps),
            "loss": loss_of(whole[0], contract),
            "seconds": time.monotonic() - started,
        }


def outcome_of(
    events: dict[str, list[dict[str, Any]]], contract: Contract, *, evaluates: bool, before: int
) -> dict[str, Any]:
    """From the workers' metrics: the way there, the text that was trained on, the share that came too late."""
    steps, tokens, losses = contract.inner.steps, dict[int, int](), dict[int, float]()
    attempts = late = 0
    for of_worker in events.values():
        for event in of_worker:
            if event["event"] == "eval":
                losses[event["round"]] = event["loss"]
            elif event["event"] == "round":
                attempts += 1
                late += event["verdict"] == "resync"
                if event["verdict"] == "commit":
                    tokens[event["round"]] = event["swarm_tokens"]
    pretraining = before * contract.inner.batch_size * contract.data.seq_len
    seen = {round: pretraining + sum(tokens[r] for r in tokens if r <= round) for round in sorted(losses)}
    return {
        "curve": [[before + round * steps, seen[round], losses[round]] for round in seen] if evaluates else [],
        "tokens": pretraining + sum(tokens.values()),
        "inner_steps": before + contract.run.rounds * steps,
        "rounds": contract.run.rounds,
        "lost_share": late / max(1, attempts),
    }


def loss_of(worker: Worker, contract: Contract) -> float:
    """Of its outer parameters on the held-out part of all text."""
    batches = validation_batches(contract.data, load_tokenizer(contract.data.tokenizer), batch_size=32)
    return validation_loss(worker.model, batches)[0]


def contract_of(cell: Cell, size: Size, seed: int, *, model: dict[str, str], rounds: int, text: Path) -> Contract:
    """What the workers of a cell run."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"id": "quality", "rounds": rounds, "seed": seed},
        "model": model,
        "data": {
            "source": f"text:{text}",
            "seq_len": size.seq_len,
            "validation_fraction": 0.05,
            "validation_sequences": size.validation_sequences,
        },
        "inner": {
            "lr": size.lr,
            "warmup_steps": size.warmup_steps,
            "batch_size": size.batch_size * cell.batch_factor,
            "steps": cell.inner_steps_of(size),
        },
        "outer": {
            "codec": "none",
            **({"optimizer": "sgd", "lr": 1.0} if cell.is_plain else {"lr": size.outer_lr}),
            "momentum": size.outer_momentum,
        },
        "evaluation": {"every_rounds": max(1, rounds // size.evaluations), "by": "one"},
    }
    for name, value in cell.settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return Contract.model_validate(sections)


def write_model(folder: Path, size: Size) -> None:
    """The configuration of a model that is smaller than any preset."""
    from transformers import LlamaConfig  # slow to import

    config = LlamaConfig(
        hidden_size=size.hidden_size,
        intermediate_size=size.hidden_size * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden_size // 32,
        num_key_value_heads=size.hidden_size // 32,
        head_dim=32,
        tie_word_embeddings=True,
        vocab_size=load_tokenizer("bytes").vocab_size,
        max_position_embeddings=size.seq_len,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)


def write_text(folder: Path, size: Size) -> Path:
    """A folder for each kind, with as much text in each, in short documents; returns the folder of all."""
    for kind, places in KINDS.items():
        (folder / kind).mkdir(parents=True)
        left = size.kind_bytes
        for number, document in enumerate(documents(places)):
            (folder / kind / f"{number:05}.txt").write_text(document[:left], encoding="utf-8")
            left -= len(document)
            if left <= 0:
                break
    return folder


def documents(places: tuple[str, ...]) -> Iterator[str]:
    """The text of files of the standard library, cut at line ends."""
    root = Path(sysconfig.get_path("stdlib"))
    for place in places:
        found = root.glob("*.py") if place == "." else (root / place).rglob("*.py")
        for file in sorted(path for path in found if SKIPPED.isdisjoint(path.relative_to(root).parts)):
            document = ""
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                document += line
                if len(document) >= DOCUMENT_BYTES:
                    yield document
                    document = ""
            if document:
                yield document


if __name__ == "__main__":
    answer_calls(Connection(int(sys.argv[1])), Runner())
