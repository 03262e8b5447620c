"""The model card (README.md) of a trained model, and beside it a record of where the model stands, for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from opendiloco.config import Contract, DataConfig, ModelConfig
from opendiloco.facts import RunFacts, Validation, read_facts
from opendiloco.rounds import Position

CARD, RECORD = "README.md", "diloco.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PACKAGES = {"opendiloco": "opendiloco-p2p", "torch": "torch", "transformers": "transformers", "hivemind": "hivemind"}


@dataclass(frozen=True)
class Record:
    """Which run's model this is, and where it stands."""

    contract: str
    """Digest of the run contract."""
    position: Position


def model_files(
    contract: Contract, position: Position | None, *, parameters: int, metrics: Sequence[Path], dtype: str = "fp32"
) -> dict[str, str]:
    """What goes into a model's folder besides model and tokenizer: name -> text.

    Args:
        dtype: number format of the weights that are saved.
        position: where the parameters stand; None where nobody knows.
        parameters: how many the model has.
        metrics: metrics.jsonl of one or several workers; may be missing.
    """
    facts = read_facts(metrics, position)
    card = model_card(contract, position, facts, weights=f"{parameters:,} parameters in {dtype}")
    if position is None:
        return {CARD: card}
    record = {
        "contract": contract.digest,
        "round": position.round,
        "lineage": position.lineage,
        "params_hash": position.params_hash,
        "tokens": position.tokens,
    }
    return {CARD: card, RECORD: json.dumps(record, indent=2) + "\n"}


def read_record(folder: Path) -> Record | None:
    """The record in a model's folder; None where there is none that can be read."""
    try:
        values = json.loads((folder / RECORD).read_text())
        position = Position(
            int(values["round"]), str(values["lineage"]), str(values["params_hash"]), int(values["tokens"])
        )
        return Record(str(values["contract"]), position)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def model_card(contract: Contract, position: Position | None, facts: RunFacts, *, weights: str) -> str:
    """README.md: a header that the hub understands, and the facts of the run. What is not known is left out."""
    title = (
        f"# {contract.run.id}\n\nA causal language model, trained with [DiLoCo](https://arxiv.org/abs/2311.08105): "
        "each worker trains a replica of its own, and once a round all of them average what they changed."
    )
    parts = [_header(contract), title, _loading(), "## Training", _table(_training(contract, position, facts))]
    settings = _table([*_model(contract, weights), *_trained(contract.model), *_optimizers(contract)])
    parts += ["## Settings", settings, *_validation(contract.data, facts)]
    if position is not None:
        parts.append(_verification(position))
    parts += [
        "## Licence",
        "None is stated. Whoever publishes this model must add one: here, and as `license:` in the header.",
        f"---\n\nWritten by {', '.join(f'{name} {metadata.version(of)}' for name, of in _PACKAGES.items())}.",
    ]
    return "\n\n".join(parts) + "\n"


def _sources(contract: Contract) -> list[str]:
    source = contract.data.source
    return [source] if isinstance(source, str) else [part.partition(" ")[2].strip() for part in source]


def _header(contract: Contract) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- diloco", "- opendiloco"]
    named = [source.removeprefix("hf:").split("/")[:2] for source in _sources(contract) if source.startswith("hf:")]
    if on_hub := list(filter(_is_on_hub, map("/".join, named))):
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in on_hub)]
    base = contract.model.name.removeprefix("hf:")
    if base != contract.model.name and _is_on_hub(base):
        lines.append(f"base_model: {json.dumps(base)}")
    return "\n".join(["---", *lines, "---"])


def _loading() -> str:
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME")\n'
        'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME")\n'
        "```\n\n"
        'or on a command line: `opendiloco generate PATH "some text"`.'
    )


def _training(contract: Contract, position: Position | None, facts: RunFacts) -> list[tuple[str, str]]:
    rows = [("run", _code(contract.run.id))]
    if position is not None:
        rows.append(("rounds committed", f"{position.round:,} of {contract.run.rounds:,}"))
        rows.append(("tokens trained on, by all workers together", f"{position.tokens:,}"))
    if facts.participants is not None:
        whole = position is not None and facts.rounds == position.round
        told = "" if whole else f" (rounds that the metrics at hand tell of: {facts.rounds:,})"
        spread = f"{facts.fewest}" if facts.fewest == facts.most else f"{facts.fewest} to {facts.most}"
        rows.append(("workers", f"{facts.participants}, and {spread} took part in each round{told}"))
    if facts.sent_bytes:  # a worker alone, or a simulated one, sends none
        rows.append(("sent by a worker in a round", f"{facts.sent_bytes / 1e6:,.2f} MB"))
    rows.append(("run contract (digest)", _code(contract.digest)))
    return rows


def _model(contract: Contract, weights: str) -> list[tuple[str, str]]:
    data = contract.data
    return [
        ("model", f"{_place(contract.model.name)}, {weights}"),
        ("text", ", ".join(map(_place, _sources(contract)))),
        ("tokenizer", _place(data.tokenizer)),
        ("sequences", f"{data.seq_len:,} tokens"),
    ]


def _trained(model: ModelConfig) -> list[tuple[str, str]]:
    """What the parameters started from and which of them were trained, where that is not the ordinary."""
    rows = []
    if model.start == "random":
        rows.append(("started from", "seeded random values"))
    elif model.start:
        place = model.start if _is_on_hub(model.start) else Path(model.start).name  # strangers get no paths
        rows.append(("started from", f"the weights of {_code(place)}"))
    if model.lora_rank:
        on = ", ".join(map(_code, model.lora_targets)) or "all linear layers but the output head"
        sizes = f"rank {model.lora_rank:,}, alpha {model.lora_alpha:,}"
        rows.append(("trained", f"LoRA adapters alone ({sizes}) on {on}; they are added to the weights here"))
    if model.frozen:
        rows.append(("not trained (frozen)", ", ".join(map(_code, model.frozen))))
    return rows


def _optimizers(contract: Contract) -> list[tuple[str, str]]:
    inner, outer, deadline = contract.inner, contract.outer, contract.rounds.deadline
    phase = f"H = {inner.steps:,} inner steps" if deadline == "adaptive" else f"{deadline:g} s of inner steps"
    momentum = "" if outer.optimizer == "sgd" else f", momentum {outer.momentum:g}"
    return [
        (
            "inner optimizer",
            f"{inner.optimizer}, lr {inner.lr:g} ({inner.warmup_steps:,} steps of warm-up, then {inner.schedule}), "
            f"weight decay {inner.weight_decay:g}, {inner.batch_size:,} sequences a step",
        ),
        ("between two rounds", phase),
        ("outer optimizer", f"{outer.optimizer}, lr {outer.lr:g}{momentum}, weights: {outer.weighting}"),
        ("codec of the pseudo-gradients", outer.codec),
    ]


def _validation(data: DataConfig, facts: RunFacts) -> list[str]:
    if facts.first is None or facts.last is None:
        return []
    shown: list[Validation] = [facts.first] if facts.first == facts.last else [facts.first, facts.last]
    rows = [f"| {v.round:,} | {v.loss:.4f} | {v.perplexity:,.2f} | {v.tokens:,} |" for v in shown]
    held = (
        f"On text that no worker trained on: {data.validation_fraction:.2%} of the documents are held out, of which at "
        f"most {data.validation_sequences:,} sequences are read. Round 0: before training."
    )
    header = "| after round | loss (nats per token) | perplexity | tokens |\n|---|---|---|---|"
    return ["## Validation", held, "\n".join([header, *rows])]


def _verification(position: Position) -> str:
    hashed = f"- `params_hash` {_code(position.params_hash)}\n" if position.params_hash else ""
    return (
        "## How to verify\n\n"
        f"After round {position.round:,}:\n\n- `lineage` {_code(position.lineage)}\n{hashed}\n"
        "Every worker that took part has the same two values in the line of this round in its `metrics.jsonl`. The "
        "lineage is a hash chain over contract, initial parameters and all rounds: participants, weights, averaged "
        "bytes. The hash is BLAKE3 over outer parameters and outer momentum; who has a checkpoint of the round can "
        "compute it, and gets these weights, bit for bit in fp32, with `opendiloco export`."
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _place(name: str) -> str:
    """The name of a model, text or tokenizer for strangers: of local files only the last part of the path."""
    scheme, colon, place = name.partition(":") if ":" in name else ("", "", name)
    is_local = scheme in ("text", "jsonl", "parquet") or place.startswith(("/", ".", "~")) or Path(place).exists()
    return _code(f"{scheme}{colon}{Path(place).name if is_local else place}")


def _is_on_hub(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).expanduser().exists()


def _code(text: str) -> str:
    """Text from a run contract, which others may have written, in a cell of a table."""
    return f"`{' '.join(text.replace('`', ' ').replace('|', ' ').split())}`"
