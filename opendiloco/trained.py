"""Which parameters are trained, and so travel: all of them, all but frozen ones, or LoRA adapters beside the model."""

from __future__ import annotations

import copy
import difflib
import math
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from opendiloco.config import ModelConfig
from opendiloco.errors import SettingsError, pip_install
from opendiloco.presets import fill_normal

_ALL = "all-linear"  # peft's word for every linear layer but the output head


def choose_trained(model: PreTrainedModel, config: ModelConfig, *, seed: int) -> PreTrainedModel:
    """The model with what model.frozen and model.lora_rank say; other parameters get no gradient.

    Adapters change nothing at first (B is 0); their A is the same bits on every machine.

    Raises:
        SettingsError: a name that matches nothing, nothing left to train, or no peft here.
    """
    if config.lora_rank:
        return _with_adapters(model, config, seed=seed)
    freeze(model, config.frozen)
    return model


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match shell-style patterns such as `model.layers.0.*`.

    Tied parameters have all their names.

    Raises:
        SettingsError: a pattern that matches nothing, or nothing is left to train.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise SettingsError(f"model.frozen has {pattern!r}, which is no parameter: {_nearest(pattern, names)}")
        for name in matching:
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise SettingsError(f"model.frozen is {list(patterns)}, which leaves nothing to train: freeze less")


def has_adapters(model: nn.Module) -> bool:
    """Whether this is a model with LoRA adapters beside it."""
    return hasattr(model, "merge_and_unload")


def merged_copy(model: Any) -> PreTrainedModel:
    """A model with adapters as an ordinary one on the CPU, the adapters added to its weights."""
    merged: PreTrainedModel = copy.deepcopy(model).cpu().merge_and_unload()
    return merged


def _with_adapters(model: PreTrainedModel, config: ModelConfig, *, seed: int) -> PreTrainedModel:
    """The model wrapped by peft: only adapters are trained."""
    try:
        from peft import LoraConfig, get_peft_model  # slow to import, and seldom needed
    except ImportError:
        raise SettingsError(
            f"model.lora_rank is {config.lora_rank}, which needs peft: {pip_install('peft')}, or set model.lora_rank=0"
        ) from None
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]  # of GPT-2
    for target in config.lora_targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            ends = {name.rpartition(".")[2] for name in linear}
            raise SettingsError(f"model.lora_targets has {target!r}, which is no layer: {_nearest(target, ends)}")
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=list(config.lora_targets) or _ALL,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses names that transformers is about to drop
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)  # peft finds it out by itself
        wrapped: PreTrainedModel = get_peft_model(model, adapters)
    generator = np.random.PCG64(seed)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and ".lora_A." in name and not parameter.is_meta:
            fill_normal(parameter, generator, std=1 / math.sqrt(3 * parameter.shape[1]))  # as peft's uniform values
    return wrapped


def _nearest(wanted: str, names: Sequence[str] | dict[str, nn.Parameter] | set[str]) -> str:
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.0)
    return f"there are {', '.join(near)}" + (" and others" if len(names) > len(near) else "")
