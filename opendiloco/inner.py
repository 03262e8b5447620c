"""An inner step: gradient of a batch, clipping, the inner optimizer (DiLoCo, Algorithm 1, arXiv:2311.08105)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from opendiloco.compute import CompiledLoss, Loss, autocast, checkpoint_activations, memory_cure
from opendiloco.config import ComputeConfig, InnerConfig
from opendiloco.errors import SettingsError
from opendiloco.loss import causal_lm_loss
from opendiloco.lossscale import LossScale
from opendiloco.separation import has_target

_SCALE = "loss_scale"  # its key beside the optimizer's state


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


class InnerSteps:
    """The inner steps of one replica, computed as a peer's settings say."""

    def __init__(
        self,
        model: nn.Module,
        config: InnerConfig,
        compute: ComputeConfig,
        *,
        trained: nn.Module | None = None,
        together: Callable[[Callable[[], tuple[float, float]]], tuple[float, float]] = lambda gradient: gradient(),
        end_id: int | None = None,
    ) -> None:
        """Prepare `model`, which is on its device.

        Args:
            trained: `model` in DistributedDataParallel: all processes of the worker then do the same steps.
            together: calls what needs all of them.
            end_id: last token of each document, where documents are to be kept apart.
        Raises:
            SettingsError: compute.checkpoint_activations, and the model cannot do it.
        """
        self._config, self._compute = config, compute
        self._trained, self._end_id = trained if trained is not None else model, end_id
        self._together = together
        self._parameters = [p for p in model.parameters() if p.requires_grad]  # finding them takes time in each step
        self._device = self._parameters[0].device
        if compute.checkpoint_activations:
            checkpoint_activations(model)
        self._loss: Loss = CompiledLoss() if compute.compile else causal_lm_loss
        self._scale = LossScale() if compute.precision == "fp16" else None

    def step(self, optimizer: torch.optim.Optimizer, tokens: Tensor, *, lr: float) -> InnerStepResult:
        """One step on one batch: forward, backward, clip, `optimizer.step()` (once).

        The gradient is that of the whole batch, whatever the micro batch; clipping comes after accumulation. With
        fp16, a gradient that overflows is computed again with half the loss scale until it does not. If loss or
        gradient is not finite all the same, no step is made: the caller looks at `finite`.

        Args:
            optimizer: any optimizer over the model's parameters; its groups' lr is set to `lr`, times their
                `lr_ratio` where they have one.
            tokens: int64 [batch, seq_len] on any device: the whole batch, of which each process takes its share.

        Raises:
            SettingsError: out of memory; or several processes, and a parameter without a gradient.
        """
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        tokens = tokens.to(self._device, non_blocking=True)
        with memory_cure(_share(self._trained, tokens), self._compute):
            loss, grad_norm = self._gradient(tokens)
            while math.isfinite(loss) and not math.isfinite(grad_norm) and self._scale is not None:
                if not self._scale.lower():
                    break
                loss, grad_norm = self._gradient(tokens)
            finite = math.isfinite(loss) and math.isfinite(grad_norm)
            if finite:
                optimizer.step()
                if self._scale is not None:
                    self._scale.count_step()
        norm = grad_norm if math.isfinite(loss) else math.nan
        return InnerStepResult(loss=loss, grad_norm=norm, tokens=tokens.numel(), finite=finite)

    def compile(self, seq_len: int) -> None:
        """Have the compiler do its work now and not in a round: one batch of ids 0, no step. Nothing else changes.

        Raises:
            SettingsError: out of memory.
        """
        tokens = torch.zeros(self._config.batch_size, seq_len, dtype=torch.int64, device=self._device)
        with memory_cure(_share(self._trained, tokens), self._compute):
            self._gradient(tokens)
        self._drop_gradients()

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state and, with fp16, the loss scale."""
        scale = {_SCALE: self._scale.state_dict()} if self._scale is not None else {}
        return {**optimizer.state_dict(), **scale}

    def restore(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Go on from what `state_of` gave, also that of a worker with another precision."""
        optimizer.load_state_dict({key: value for key, value in state.items() if key != _SCALE})
        if self._scale is not None and _SCALE in state:
            self._scale.load_state_dict(state[_SCALE])

    def _gradient(self, tokens: Tensor) -> tuple[float, float]:
        """Put the clipped gradient of the batch's mean loss into .grad; that loss, and the norm before clipping."""
        return self._together(lambda: self._own_gradient(tokens))

    def _own_gradient(self, tokens: Tensor) -> tuple[float, float]:
        try:
            loss = self._accumulate(tokens)
        except Exception as error:
            if not isinstance(self._loss, CompiledLoss) or not self._loss.give_up(error):
                raise
            loss = self._accumulate(tokens)
        self._check_gradients()
        if self._scale is not None:  # before anything looks at them
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], 1 / self._scale.value)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm or math.inf)
        both: list[float] = torch.stack((loss, norm.to(loss.dtype))).tolist()  # one wait for the device, not two
        return both[0], both[1]

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _accumulate(self, tokens: Tensor) -> Tensor:
        """Put the gradient of the batch's mean loss, times the loss scale, into .grad; returns that loss, fp32."""
        self._drop_gradients()  # not before: memory that goes back to the system costs page faults in every step
        scale = self._scale.value if self._scale is not None else 1.0
        total, end_id = torch.zeros((), device=tokens.device), self._end_id
        targets = has_target(tokens, end_id).sum().clamp(min=1)
        parts = torch.split(_share(self._trained, tokens), self._compute.micro_batch_size or len(tokens))
        for number, part in enumerate(parts, start=1):
            with _gradients_kept_apart(self._trained, until_last=number < len(parts)):
                with autocast(tokens.device, self._compute.precision):
                    loss = self._loss(self._trained, part, end_id=end_id)
                # each target counts the same, in whichever part it is; without end_id sequences have equally many
                share = len(part) / len(tokens) if end_id is None else has_target(part, end_id).sum() / targets
                share = share * _process_count(self._trained)  # whose gradients are averaged
                (loss * (share * scale)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * share
        return _mean(self._trained, total)

    def _check_gradients(self) -> None:
        """Processes that train together need a gradient of every parameter: DDP waits for it in vain.

        Raises:
            SettingsError: a parameter that is to be trained has none.
        """
        if not isinstance(self._trained, DistributedDataParallel) or all(p.grad is not None for p in self._parameters):
            return
        named = self._trained.module.named_parameters()
        names = [name for name, p in named if p.requires_grad and p.grad is None]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise SettingsError(
            f"model.frozen leaves {', '.join(names[:3])}{more} to be trained, of which text gives no gradient, and a "
            f"worker of {_process_count(self._trained)} processes cannot do without: add them to model.frozen in the "
            "run's contract, or start one process"
        )


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
