"""Models of transformers, in a folder or on the hub: found, checked against the run's settings, loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from opendiloco.errors import SettingsError
from opendiloco.hub import tell_of_hub

MOST_PADDING, SMALL_PADDING = 1.25, 128  # of a vocabulary
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# What decides how a model computes and does not show in the shapes of its parameters.
_SAME_IN_BOTH = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def find_config(setting: str, place: str) -> Any:
    """The configuration of the model in the folder or of the hub name `place`.

    Args:
        setting: the setting and its value, for the error line.
    Raises:
        SettingsError: there is no such model.
    """
    source, is_folder = _source(setting, place)
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        where = "holds no model" if is_folder else "is no folder here and was not found on the hub"
        raise SettingsError(
            f"{setting}, which {where}: name a folder with a config.json of a causal language model"
        ) from error


def check_fits(config: Any, name: str, *, vocab_size: int, seq_len: int) -> None:
    """Raise SettingsError where a model's vocabulary or context is too small for the tokenizer or data.seq_len."""
    known = getattr(config.get_text_config(), "vocab_size", None)
    if known is not None and known < vocab_size:
        raise SettingsError(
            f"model.name is {name} with a vocabulary of {known}, but data.tokenizer has {vocab_size} ids: use the "
            "model's own tokenizer"
        )
    context = context_tokens(config)
    if context is not None and context < seq_len:
        raise SettingsError(
            f"data.seq_len is {seq_len}, but model.name {name} takes at most {context} tokens: lower data.seq_len"
        )


def check_tokenizer(config: Any, name: str, *, vocab_size: int) -> None:
    """Raise SettingsError where a model would go on from weights that know another tokenizer's ids.

    A vocabulary may be padded, which makes it a little larger than the tokenizer's.
    """
    known = getattr(config.get_text_config(), "vocab_size", None)
    if known is not None and known > MOST_PADDING * vocab_size + SMALL_PADDING:
        place = name.removeprefix("hf:")
        raise SettingsError(
            f"model.name is {name} with weights for {known} tokens, but data.tokenizer has {vocab_size} ids, so it is "
            f"another one's: set data.tokenizer to {place}, or model.start to random"
        )


def from_config(config: Any, name: str) -> PreTrainedModel:
    """A newly initialized model in fp32, on the default device."""
    return _load(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32), name=name)


def from_weights(place: str, name: str) -> PreTrainedModel:
    """The model with its weights, in fp32; attention is SDPA where the model has it (transformers' own choice)."""
    source, _ = _source(name, place)
    return _load(lambda: AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), name=name)


def has_weights(place: str) -> bool:
    """False for a folder that has none. What the hub has shows when it is loaded."""
    folder = Path(place).expanduser()
    return not folder.is_dir() or any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES)


def check_same_parameters(model: PreTrainedModel, source: PreTrainedModel, *, name: str, start: str) -> None:
    """Raise SettingsError unless the weights of `source` fit `model`, which is that of model.name.

    It names the first parameter that does not fit, or the setting of the model that differs.
    """
    ours, theirs = (dict(each.named_parameters()) for each in (model, source))
    wanted = f"model.start is {start}"
    cure = "name weights of the same size and tokenizer, or change model.name"
    for parameter, value in ours.items():
        if parameter not in theirs:
            raise SettingsError(f"{wanted}, which has no parameter {parameter} of model.name {name}: {cure}")
        if theirs[parameter].shape != value.shape:
            raise SettingsError(
                f"{wanted}, whose parameter {parameter} is {list(theirs[parameter].shape)}, but in model.name {name} "
                f"it is {list(value.shape)}: {cure}"
            )
    if more := [parameter for parameter in theirs if parameter not in ours]:
        raise SettingsError(f"{wanted}, whose parameter {more[0]} model.name {name} does not have: {cure}")
    for key in _SAME_IN_BOTH:
        here, there = (getattr(each.config, key, None) for each in (model, source))
        if here != there:
            raise SettingsError(f"{wanted}, whose {key} is {there}, but in model.name {name} it is {here}: {cure}")


@torch.no_grad()
def copy_parameters(source: nn.Module, model: nn.Module) -> None:
    """Give `model` the values of `source`, which has the same parameters."""
    theirs = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(theirs[name])


def context_tokens(config: Any) -> int | None:
    """Tokens the model can see at once; None if its configuration sets no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws a bar per saved or loaded file, even of a small model: not into a worker's log."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _source(setting: str, place: str) -> tuple[str, bool]:
    """What transformers shall read, and whether it is a folder here."""
    folder = Path(place).expanduser()
    if folder.is_dir():
        return str(folder), True
    if folder.is_absolute() or place.startswith((".", "~")):
        raise SettingsError(f"{setting}, but there is no such folder: correct the path")
    tell_of_hub(place)
    return place, False


def _load(load: Callable[[], PreTrainedModel], *, name: str) -> PreTrainedModel:
    try:
        with without_progress_bars():
            return load()
    except ValueError as error:
        raise SettingsError(f"{name} is no causal language model that transformers knows: name another") from error
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SettingsError(f"the weights of {name} cannot be read: {reason}") from error
