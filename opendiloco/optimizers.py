"""Inner optimizers: AdamW, AdamW with moments of one byte (bitsandbytes), Muon for the hidden matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opendiloco.config import InnerConfig
from opendiloco.errors import SettingsError, pip_install

_PROBE_VALUES = 4096  # the smallest parameter whose moments bitsandbytes keeps in 8 bits


def make_inner_optimizer(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """The optimizer of inner.optimizer over the parameters that are trained.

    Weight decay (decoupled) applies to matrices and embeddings. Vectors (gains of norms, biases) are in a
    group of their own without decay: they set scales, which decay towards 0 would only distort.

    Raises:
        SettingsError: it does not work here (see `check_inner_optimizer`).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    check_inner_optimizer(config, trained[0].device if trained else torch.device("cpu"))
    if config.optimizer == "adamw8bit":
        return _adamw8bit(_groups(trained, config), config)
    if config.optimizer == "muon":
        outside = _ids_of_embeddings_and_head(model)
        hidden = [p for p in trained if p.dim() == 2 and id(p) not in outside]
        listed = {id(p) for p in hidden}
        return MuonAndAdamW(hidden, _groups([p for p in trained if id(p) not in listed], config), config)
    return _adamw(_groups(trained, config), config)


def check_inner_optimizer(config: InnerConfig, device: torch.device) -> None:
    """Find out whether inner.optimizer works with what is installed here and on this device.

    Raises:
        SettingsError: torch has no Muon, or bitsandbytes is missing or cannot compute on the device.
    """
    if config.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise SettingsError(
            f"inner.optimizer is muon, which torch {torch.__version__} does not have: install torch 2.9 or newer, or "
            "use a run with inner.optimizer=adamw"
        )
    if config.optimizer == "adamw8bit":
        probe = nn.Parameter(torch.zeros(_PROBE_VALUES, device=device))
        probe.grad = torch.ones_like(probe)
        try:
            _adamw8bit([{"params": [probe]}], config).step()
        except Exception as error:  # whatever a build without kernels for this device raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise SettingsError(
                f"inner.optimizer is adamw8bit, which bitsandbytes cannot compute on {device} here ({reason}): "
                f"{pip_install('--upgrade', 'bitsandbytes')}, use a CUDA device, or a run with inner.optimizer=adamw"
            ) from None


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices and AdamW for the rest, as one optimizer with one state.

    Groups of Muon have an `lr_ratio`: their learning rate over that of the others.
    """

    def __init__(self, hidden: list[nn.Parameter], others: list[dict[str, Any]], config: InnerConfig) -> None:
        """`hidden`: matrices; `others`: parameter groups."""
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            ratio = (config.muon_lr or config.lr) / config.lr
            # Steps have the size of AdamW's (0.2 sqrt(max side), arXiv:2502.16982): one learning rate fits both.
            muon = torch.optim.Muon(
                [{"params": hidden, "lr_ratio": ratio}],
                lr=config.lr * ratio,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self._parts.append(muon)
        if others:
            self._parts.append(_adamw(others, config))
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": config.lr})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Give the parts these groups and this state, so that there is one of each."""
        start = 0
        for part in self._parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            start = stop


def _groups(parameters: list[nn.Parameter], config: InnerConfig) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], config: InnerConfig) -> torch.optim.AdamW:
    """torch's AdamW, in its fused form where devices and dtypes have one."""
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)


def _adamw8bit(groups: list[dict[str, Any]], config: InnerConfig) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit  # slow to import, and seldom needed

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas)
    return optimizer


def _ids_of_embeddings_and_head(model: nn.Module) -> set[int]:
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {id(p) for module in [*modules, *([head] if head is not None else [])] for p in module.parameters()}
