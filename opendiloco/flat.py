"""A model's trainable parameters as one flat fp32 vector and back; the layout that all peers must share."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from opendiloco.errors import SettingsError

_CHUNK = 1 << 20  # values rounded through a parameter's dtype at a time
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One parameter's place in the flat vector: values offset ... offset + numel."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Which value of the flat vector belongs to which parameter."""

    entries: tuple[FlatEntry, ...]
    numel: int
    """N: length of the flat vector."""
    digest: str
    """Hex BLAKE3 over names, shapes and dtypes in order: peers with another one train another model."""

    @classmethod
    def of(cls, model: nn.Module) -> FlatLayout:
        """The layout of a model's trainable parameters, in the order of `trainable_parameters(model)`.

        Raises:
            SettingsError: a trainable parameter is none of fp16, bf16, fp32, fp64.
        """
        entries: list[FlatEntry] = []
        offset = 0
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dtype not in _DTYPES:
                raise SettingsError(
                    f"parameter {name} is {parameter.dtype}: only fp16, bf16, fp32 and fp64 can be averaged, "
                    "freeze it (requires_grad_(False)) or convert it"
                )
            shape = tuple(parameter.shape)
            entries.append(FlatEntry(name, shape, parameter.dtype, offset, parameter.numel()))
            offset += parameter.numel()
        return cls(tuple(entries), offset, _digest(entries))


def replica_digest(model: nn.Module) -> str:
    """Hex digest of what a replica has in common with all others of its run besides theta.

    That is the layout and, where parameters are frozen, their values: they never travel, so they must be equal from
    the start.
    """
    layout = FlatLayout.of(model).digest
    hasher = blake3(f"opendiloco frozen {layout}".encode())
    frozen = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    for name, parameter in frozen:
        hasher.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        hasher.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest() if frozen else layout


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are averaged: tied ones once, frozen ones and buffers not at all."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what torch.compile made of it: names of parameters must not depend on that."""
    inside = getattr(model, "_orig_mod", model)
    return inside if isinstance(inside, nn.Module) else model


def check_parameters(groups: Sequence[Mapping[str, Any]], trained: Sequence[Tensor]) -> None:
    """Raise SettingsError when an optimizer's parameter groups hold something else than the parameters averaged."""
    known = {id(parameter) for parameter in trained}
    strange = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in known]
    if strange:
        raise SettingsError(
            f"the inner optimizer has {len(strange)} parameters that are not the model's, and nobody would average "
            "them: make it from the parameters of the very model that DiLoCo gets"
        )


@torch.no_grad()
def gather(parameters: Sequence[Tensor], out: Tensor) -> None:
    """Copy parameters into the flat vector `out` (fp32 [N], any device), each rounded to fp32.

    Raises:
        ValueError: `out` is not fp32 [N], N being the number of values in all parameters.
    """
    for parameter, values in _slices(parameters, out, "out"):
        values.view(parameter.shape).copy_(parameter)


@torch.no_grad()
def scatter(flat: Tensor, parameters: Sequence[Tensor]) -> None:
    """Copy `flat` (fp32 [N], any device) into the parameters, each value rounded to its parameter's dtype.

    Raises:
        ValueError: `flat` is not fp32 [N], N being the number of values in all parameters.
    """
    for parameter, values in _slices(parameters, flat, "flat"):
        parameter.copy_(values.view(parameter.shape))


@torch.no_grad()
def write_pseudo_gradient(theta: Tensor, parameters: Sequence[Tensor], out: Tensor) -> None:
    """out = theta_t - theta_i (DiLoCo, Algorithm 1, line 8, arXiv:2311.08105), computed in fp32.

    theta_t counts as the replica saw it, that is rounded to each parameter's dtype by `scatter`: a bf16
    replica that has not trained has a pseudo-gradient of exactly 0.

    Args:
        theta: fp32 [N], outer parameters after t rounds; only read.
        parameters: theta_i, in the layout's order, on any device; only read.
        out: fp32 [N] on theta's device; must not share memory with theta.

    Raises:
        ValueError: a vector is not fp32 [N], N being the number of values in all parameters, or theta and
            out are on different devices.
    """
    if theta.device != out.device:
        raise ValueError(f"theta is on {theta.device} and out on {out.device}: use one device for both")
    anchors = _slices(parameters, theta, "theta")
    for (parameter, anchor), (_, values) in zip(anchors, _slices(parameters, out, "out"), strict=True):
        values.view(parameter.shape).copy_(parameter)
        for start in range(0, parameter.numel(), _CHUNK):
            seen, value = anchor[start : start + _CHUNK], values[start : start + _CHUNK]
            torch.sub(seen.to(parameter.dtype).to(torch.float32), value, out=value)


def _slices(parameters: Sequence[Tensor], flat: Tensor, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, its values in the flat vector: fp32 [numel]), after all sizes are found to fit."""
    if flat.dtype != torch.float32 or flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"{name} is {flat.dtype} {list(flat.shape)}: it must be fp32, one-dimensional, contiguous")
    sizes = [parameter.numel() for parameter in parameters]
    if sum(sizes) != flat.numel():
        raise ValueError(
            f"{name} holds {flat.numel()} values and the parameters {sum(sizes)}: "
            "pass trainable_parameters(model) and a vector of FlatLayout.numel values"
        )
    return zip(parameters, flat.split_with_sizes(sizes), strict=True) if sizes else iter(())


def _digest(entries: Sequence[FlatEntry]) -> str:
    hasher = blake3(b"opendiloco layout")
    for entry in entries:
        for part in (entry.name, str(entry.dtype), ",".join(map(str, entry.shape))):
            hasher.update(struct.pack("<Q", len(part.encode())))
            hasher.update(part.encode())
    return hasher.hexdigest()
