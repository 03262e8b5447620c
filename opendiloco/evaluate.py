"""Validation loss of a model, and the commands `eval` and `generate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from opendiloco.compute import autocast, choose_device, memory_cure, move_model
from opendiloco.config import ComputeConfig, DataConfig, Precision
from opendiloco.generation import generate_text
from opendiloco.loss import causal_lm_loss
from opendiloco.mixture import check_sources
from opendiloco.model import load_model
from opendiloco.pretrained import check_fits
from opendiloco.separation import check_separation, has_target
from opendiloco.tokens import validation_batches

EVAL_BATCH_SIZE = 8  # where compute.micro_batch_size says nothing


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    precision: Precision = "fp32",
    end_id: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """Mean next-token cross entropy (nats) over `batches` of int64 [batch, seq_len], and how many tokens that was.

    Args:
        end_id: last token of each document, where documents are to be kept apart.
        between: called before each batch; what it raises ends the evaluation, with the model as before.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for batch in batches:
            between()
            with autocast(device, precision):
                loss = float(causal_lm_loss(model, batch.to(device), end_id=end_id))
            predicted = int(has_target(batch, end_id).sum())
            total += loss * predicted
            count += predicted
    finally:
        model.train(training)
    return total / max(1, count), count


def run_eval(model_dir: Path, data: DataConfig, *, compute: ComputeConfig) -> int:
    """Print validation loss and perplexity of a saved model on the held-out part of `data`.

    Raises:
        SettingsError: the model, the data or the device cannot be had, do not fit each other, or memory runs out.
    """
    check_sources(data)
    device, name = choose_device(compute), str(model_dir)
    model, tokenizer = load_model(model_dir)
    check_fits(model.config, name, vocab_size=tokenizer.vocab_size, seq_len=data.seq_len)
    move_model(model, device, name=name)
    batches = validation_batches(data, tokenizer, batch_size=compute.micro_batch_size or EVAL_BATCH_SIZE)
    end_id = tokenizer.end_id if data.separate_documents else None
    if end_id is not None:
        check_separation(model, end_id, name=name)
    with memory_cure(batches[0], compute, trains=False):
        loss, tokens = validation_loss(model, batches, precision=compute.precision, end_id=end_id)
    print(f"validation loss {loss:.4f} | perplexity {math.exp(min(loss, 700.0)):.2f} | {tokens} tokens")
    return 0


def run_generate(model_dir: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int) -> int:
    """Print the prompt and what the model writes after it."""
    model, tokenizer = load_model(model_dir)
    text = generate_text(model, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    print(prompt + text)
    return 0
