"""The inner phase's optimizer, its learning rate, and one inner step (DiLoCo, Algorithm 1, arXiv:2311.08105)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from opendiloco.config import ComputeConfig, InnerConfig
from opendiloco.errors import SettingsError
from opendiloco.model import causal_lm_loss
from opendiloco.separation import has_target


@dataclass(frozen=True)
class InnerStepResult:
    """What one inner step did."""

    loss: float
    """Mean cross entropy of the batch in nats, before the step."""
    grad_norm: float
    """Norm of the whole gradient before clipping; NaN if the loss was not finite."""
    tokens: int
    """Tokens of the batch."""
    finite: bool
    """False: loss or gradient was not finite, and the optimizer made no step."""


def make_inner_optimizer(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained, in torch's fused form where devices and dtypes have one.

    Weight decay (decoupled) applies to matrices and embeddings. Vectors (gains of norms, biases) are in a
    group of their own without decay: they set scales, which decay towards 0 would only distort.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, fused=fused
    )


def learning_rate(step: int, *, config: InnerConfig, total_steps: int) -> float:
    """Learning rate of a global inner step: a pure function, so a joiner has the right one by construction.

    Linear warm-up from lr / warmup_steps at step 0 to lr; then constant, or a cosine that reaches
    min_lr_ratio * lr at `total_steps` and stays there. A run shorter than its warm-up never gets further.

    Args:
        step: global inner step, from 0 (round * H + step of the round).
        total_steps: inner steps of the whole run (rounds * H).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def inner_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    *,
    config: InnerConfig,
    lr: float,
    micro_batch_size: int = 0,
    precision: Literal["fp32", "bf16"] = "fp32",
    end_id: int | None = None,
) -> InnerStepResult:
    """One step on one batch: forward, backward, clip, `optimizer.step()` (once).

    The gradient is that of the whole batch, whatever the micro batch; clipping comes after accumulation.
    If loss or gradient is not finite, no step is made: the caller looks at `finite`.

    Args:
        model: plain, or wrapped in DistributedDataParallel: then all processes call this with the same arguments.
        optimizer: any optimizer over the model's parameters; its groups' lr is set to `lr`.
        tokens: int64 [batch, seq_len] on any device: the whole batch, of which each process takes its share.
        micro_batch_size: sequences per forward pass; 0 takes the whole batch.
        precision: bf16 runs forward and backward under autocast; parameters and gradients stay fp32.
        end_id: last token of each document, where documents are to be kept apart.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss = _accumulate(model, tokens, micro_batch_size=micro_batch_size, precision=precision, end_id=end_id)
    grad_norm = _clip(model, config.clip_norm) if math.isfinite(loss) else math.nan
    finite = math.isfinite(grad_norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return InnerStepResult(loss=loss, grad_norm=grad_norm, tokens=tokens.numel(), finite=finite)


def _accumulate(
    model: nn.Module,
    tokens: Tensor,
    *,
    micro_batch_size: int,
    precision: Literal["fp32", "bf16"],
    end_id: int | None,
) -> float:
    """Add the gradient of the batch's mean loss to .grad; returns that loss."""
    tokens = tokens.to(next(model.parameters()).device, non_blocking=True)
    total, targets = torch.zeros((), device=tokens.device), has_target(tokens, end_id).sum().clamp(min=1)
    parts = torch.split(_share(model, tokens), micro_batch_size or len(tokens))
    for number, part in enumerate(parts, start=1):
        with _gradients_kept_apart(model, until_last=number < len(parts)):
            with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = causal_lm_loss(model, part, end_id=end_id)
            # each target counts the same, in whichever part it is; without end_id sequences have equally many
            share = len(part) / len(tokens) if end_id is None else has_target(part, end_id).sum() / targets
            loss = loss * (share * _process_count(model))  # whose gradients are averaged
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return float(_mean(model, total))


def _share(model: nn.Module, tokens: Tensor) -> Tensor:
    """The sequences of a batch that this process of the worker computes: all, or every so many-th."""
    if not isinstance(model, DistributedDataParallel):
        return tokens
    return tokens[distributed.get_rank() :: _process_count(model)]


def _process_count(model: nn.Module) -> int:
    """Of the worker, as far as they train this model together."""
    return distributed.get_world_size() if isinstance(model, DistributedDataParallel) else 1


def _gradients_kept_apart(model: nn.Module, *, until_last: bool) -> AbstractContextManager[None]:
    """Processes average their gradients once a batch, with the last part."""
    if until_last and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def _mean(model: nn.Module, value: Tensor) -> Tensor:
    """Of a value over the processes that train the model together."""
    if isinstance(model, DistributedDataParallel):
        distributed.all_reduce(value)
        value /= _process_count(model)
    return value


def _clip(model: nn.Module, clip_norm: float) -> float:
    """Scale the gradient down to `clip_norm` (0: leave it); returns its norm before that."""
    largest = clip_norm if clip_norm > 0 else math.inf
    return float(nn.utils.clip_grad_norm_(model.parameters(), largest))


def choose_device(compute: ComputeConfig) -> torch.device:
    """The device of compute.device; also sets the number of CPU threads.

    Raises:
        SettingsError: there is no such device.
    """
    if compute.threads:
        torch.set_num_threads(compute.threads)
    if compute.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=compute.device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"compute.device {compute.device!r} cannot be used ({reason}): try auto or cpu") from None
