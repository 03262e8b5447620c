"""AdamW's moments as flat vectors: what a worker gives to joiners, and how a joiner takes them over."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from opendiloco.flat import gather

FIRST, SECOND = "exp_avg", "exp_avg_sq"  # torch.optim.AdamW's names

logger = logging.getLogger(__name__)


@torch.no_grad()
def store_moments(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], first: Tensor, second: Tensor
) -> None:
    """Copy the moments into fp32 [N] each, zeros where the optimizer has none yet; nothing into empty tensors."""
    if not first.numel():
        return
    for name, out in ((FIRST, first), (SECOND, second)):
        gather([optimizer.state[p].get(name, torch.zeros_like(p)) for p in parameters], out)


@torch.no_grad()
def load_moments(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], first: Tensor, second: Tensor, *, step: int
) -> None:
    """Go on from another worker's moments, as after `step` steps; from zero where they make no sense.

    Empty tensors: nobody gives any. The others come from a stranger: values that are not finite, or second moments
    below 0, are not used.
    """
    if not first.numel():
        return
    if not bool(torch.isfinite(first).all()) or not bool((second >= 0).all()) or not bool(torch.isfinite(second).all()):
        logger.warning("the moments that a donor gave make no sense: the inner optimizer starts from zero")
        return
    on_device = {
        id(p)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for p in group["params"]
    }
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        optimizer.state[parameter] = {
            "step": torch.tensor(float(max(1, step)), device=parameter.device if id(parameter) in on_device else "cpu"),
            FIRST: first[start:stop].view(parameter.shape).to(parameter, copy=True),
            SECOND: second[start:stop].view(parameter.shape).to(parameter, copy=True),
        }
        start = stop
