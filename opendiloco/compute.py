"""How this peer computes: its device, autocast, the compiled training pass, and what to do when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from opendiloco.config import ComputeConfig, Precision
from opendiloco.errors import SettingsError
from opendiloco.loss import causal_lm_loss
from opendiloco.machine import cores

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
_GLOO = ("gloo/transport/", "gloo/rendezvous/")  # where its errors say they come from
_OWN_NCCL_ERRORS = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError")

logger = logging.getLogger(__name__)


class Loss(Protocol):
    """`causal_lm_loss`, or what stands for it."""

    def __call__(self, model: nn.Module, tokens: Tensor, *, end_id: int | None = None) -> Tensor: ...


def choose_device(compute: ComputeConfig) -> torch.device:
    """The device of compute.device; also sets the number of CPU threads.

    Raises:
        SettingsError: there is no such device, or more threads than cores.
    """
    if compute.threads:
        if compute.threads > (there := cores()):
            raise SettingsError(
                f"compute.threads is {compute.threads}, and this machine has {there} cores: threads without a core "
                f"only wait for one another; use at most {there}, or 0 for torch's default"
            )
        torch.set_num_threads(compute.threads)
    if compute.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=compute.device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"compute.device {compute.device!r} cannot be used ({reason}): try auto or cpu") from None


def move_model(model: nn.Module, device: torch.device, *, name: str) -> None:
    """Put a model on its device.

    Raises:
        SettingsError: it does not fit there; `name` is its model.name.
    """
    with out_of_memory(lambda: f"out of memory: model.name {name} does not fit on {device}: use a smaller model"):
        model.to(device)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Autocast of a forward pass; none with fp32."""
    return torch.autocast(device.type, dtype=_DTYPES.get(precision), enabled=precision in _DTYPES)


class CompiledLoss:
    """`causal_lm_loss` compiled by torch.compile. Where the compiler fails, the plain one from then on.

    The compiler works at the first call with each batch size, and again at the first backward pass.
    """

    def __init__(self) -> None:
        self._loss: Loss = torch.compile(causal_lm_loss, dynamic=False)
        self.is_compiled = True

    def __call__(self, model: nn.Module, tokens: Tensor, *, end_id: int | None = None) -> Tensor:
        """As `causal_lm_loss`; raises whatever a compiler raises."""
        return self._loss(model, tokens, end_id=end_id)

    def give_up(self, error: Exception) -> bool:
        """After an error of forward or backward: whether the plain loss is worth a try, which is used from now on."""
        if not self.is_compiled or is_out_of_memory(error) or is_lost_process(error):
            return False
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        logger.warning(
            "torch.compile failed (%s: %s): training goes on without it (compute.compile=false avoids the attempt)",
            type(error).__name__,
            reason,
        )
        self._loss, self.is_compiled = causal_lm_loss, False
        return True


def checkpoint_activations(model: Any) -> None:
    """Have a model compute its activations again in the backward pass instead of keeping them.

    Raises:
        SettingsError: the model cannot do that.
    """
    options = {"use_reentrant": False}  # the form that works with frozen parameters and torch.compile
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(options)
        else:  # its name in older versions of transformers
            model.gradient_checkpointing_enable(options)
    except (AttributeError, ValueError):
        raise SettingsError(
            f"compute.checkpoint_activations is true, but {type(model).__name__} does not support it: set it to false, "
            "and lower compute.micro_batch_size to save memory"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory for a tensor, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def is_lost_process(error: BaseException) -> bool:
    """Whether torch could not reach another process of this worker: all other errors are of this process."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, distributed.DistError):
        return not any(sign in str(error) for sign in _OWN_NCCL_ERRORS)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GLOO)


@contextmanager
def out_of_memory(line: Callable[[], str]) -> Iterator[None]:
    """Say `line` when memory runs out in the block.

    Raises:
        SettingsError: it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError(line()) from None


def memory_cure(tokens: Tensor, compute: ComputeConfig, *, trains: bool = True) -> AbstractContextManager[None]:
    """Say what to change when memory runs out in the block.

    Args:
        tokens: [batch, seq_len], what this process computes.
        trains: whether it also keeps activations, for a backward pass.

    Raises:
        SettingsError: it did.
    """
    return out_of_memory(lambda: _memory_line(len(tokens), tokens.shape[1], compute, trains=trains))


def _memory_line(batch: int, seq_len: int, compute: ComputeConfig, *, trains: bool) -> str:
    used = min(compute.micro_batch_size or batch, batch)
    size = f"compute.micro_batch_size is {compute.micro_batch_size}"
    if used > 1:
        whole = f", all {batch} sequences at once" if used == batch else ""
        return (
            f"out of memory: {size}{whole}, with {seq_len} tokens a sequence: try compute.micro_batch_size={used // 2}"
        )
    cures = ["compute.checkpoint_activations=true"] if trains and not compute.checkpoint_activations else []
    cures += ["compute.precision=bf16"] if compute.precision == "fp32" else []
    cures += [f"a run with data.seq_len below {seq_len} or a smaller model"]
    return f"out of memory with one sequence at a time ({size}): try {', or '.join(cures)}"
