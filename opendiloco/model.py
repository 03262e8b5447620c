"""Models of a run: presets and those of transformers, with what is trained of them; the saved folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from opendiloco.config import ModelConfig
from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.presets import PRESETS, initialize, preset_config
from opendiloco.pretrained import (
    check_fits,
    check_same_parameters,
    check_tokenizer,
    copy_parameters,
    find_config,
    from_config,
    from_weights,
    has_weights,
    without_progress_bars,
)
from opendiloco.tokenizer import Tokenizer, load_saved_tokenizer
from opendiloco.trained import choose_trained, has_adapters, merged_copy

RANDOM = "random"  # model.start of a model that begins from seeded random parameters

_ONE_AT_A_TIME = threading.Lock()  # torch's random generator belongs to the whole process


def build_model(config: ModelConfig, *, vocab_size: int, seq_len: int, seed: int) -> PreTrainedModel:
    """The model of model.name on the CPU in fp32, in training mode.

    The parameters depend on the arguments alone. A preset's are bit-identical on every machine, those of
    `hf:` without weights on machines with the same torch and the same kind of CPU. The global random state
    stays as it was.

    Args:
        vocab_size: number of the tokenizer's ids.
        seq_len: tokens per sequence.
    Raises:
        SettingsError: unknown name; no such model; vocabulary or context of an `hf:` model too small; weights of
            model.start that do not fit; parameters to freeze or to adapt that are not there.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # of the CPU; torch.manual_seed would change all devices
        model = _untrained_or_loaded(config, vocab_size=vocab_size, seq_len=seq_len, seed=seed)
        model.config.use_cache = False  # training never looks back at keys and values
        model = choose_trained(model, config, seed=seed)
    return model.train()


def check_model(config: ModelConfig, *, vocab_size: int, seq_len: int) -> PreTrainedModel:
    """Find out what `build_model` would say, without reading or holding any weights: those of the model are not there.

    Raises:
        SettingsError: as `build_model`, but for weights that are damaged.
    """
    with torch.device("meta"):
        model = _untrained(config, vocab_size=vocab_size, seq_len=seq_len)
        if config.name.startswith("hf:") and not config.start and has_weights(config.name.removeprefix("hf:")):
            check_tokenizer(_config_of(config.name), config.name, vocab_size=vocab_size)
        if start := _start(config):
            there = find_config(f"model.start is {start}", start)
            check_same_parameters(model, from_config(there, start), name=config.name, start=start)
        return choose_trained(model, config, seed=0)


def _untrained_or_loaded(config: ModelConfig, *, vocab_size: int, seq_len: int, seed: int) -> PreTrainedModel:
    """The model in fp32, with the parameters that model.start asks for."""
    place = config.name.removeprefix("hf:")
    if config.name.startswith("hf:") and not config.start and has_weights(place):
        check_fits(_config_of(config.name), config.name, vocab_size=vocab_size, seq_len=seq_len)
        check_tokenizer(_config_of(config.name), config.name, vocab_size=vocab_size)
        return from_weights(place, config.name)
    model = _untrained(config, vocab_size=vocab_size, seq_len=seq_len)
    if start := _start(config):
        source = from_weights(start, start)
        check_same_parameters(model, source, name=config.name, start=start)
        copy_parameters(source, model)
    elif config.name in PRESETS:
        initialize(model, seed)
    return model


def _untrained(config: ModelConfig, *, vocab_size: int, seq_len: int) -> PreTrainedModel:
    """The model of model.name on the default device, in fp32, with torch's initial parameters."""
    if config.name in PRESETS:
        return LlamaForCausalLM(preset_config(config.name, vocab_size=vocab_size, seq_len=seq_len)).float()
    there = _config_of(config.name)
    check_fits(there, config.name, vocab_size=vocab_size, seq_len=seq_len)
    return from_config(there, config.name)


def _config_of(name: str) -> Any:
    """The configuration of an `hf:` model."""
    if not name.startswith("hf:"):
        presets = f"{', '.join(PRESETS)} or hf:NAME_OR_PATH"
        cure = f"write hf:{name}" if Path(name).is_dir() else f"use {presets}"
        raise SettingsError(f"model.name is {name!r}: {cure}")
    return find_config(f"model.name is {name}", name.removeprefix("hf:"))


def _start(config: ModelConfig) -> str:
    """Where other weights than the model's own are, if anywhere."""
    if not config.start or config.start == RANDOM:
        return ""
    find_config(f"model.start is {config.start}", config.start)
    if not has_weights(config.start):
        raise SettingsError(f"model.start is {config.start}, which holds no weights: name a folder that training wrote")
    return config.start


def count_parameters(model: nn.Module) -> int:
    """Number of parameters as they are saved: tied ones once, adapters in the weights that they are added to."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if ".lora_" not in name)


def check_model_folder(folder: Path) -> None:
    """Raise SettingsError where a model cannot be saved, because something else is there."""
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{folder} is a file: name a folder")
    if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty and holds no model that could be replaced: name another one")


def describe_size(model: nn.Module) -> str:
    """How many parameters, and how many of them are trained where that is not all."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    whole = count_parameters(model)
    return f"{whole / 1e6:.2f} M parameters" + (f", {trained / 1e6:.3f} M of them trained" if trained < whole else "")


def save_model(
    model: PreTrainedModel, tokenizer: Tokenizer, folder: Path, *, files: Mapping[str, str] | None = None
) -> None:
    """Write a Hugging Face folder (safetensors) with its tokenizer: complete, or as if nothing happened.

    A model folder that is there already is replaced. LoRA adapters are added to the weights; by themselves they are
    in `adapter/`.

    Args:
        files: other ones that belong there: name -> text.

    Raises:
        SettingsError: the folder holds something else than a model.
        OpendilocoError: the disk is full or does not take it; a model that was there before is whole.
    """
    check_model_folder(folder)
    beside = folder.with_name(f".{folder.name}.new")
    replaced = folder.with_name(f".{folder.name}.old")
    for leftover in (beside, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        with without_progress_bars():
            if has_adapters(model):
                merged_copy(model).save_pretrained(beside)
                model.save_pretrained(beside / "adapter", save_embedding_layers=False)  # as peft reads them
            else:
                model.save_pretrained(beside)
        tokenizer.save(beside)
        for name in ("config.json", "generation_config.json"):
            _edit_json(beside / name, use_cache=True, eos_token_id=tokenizer.end_id)
        for name, text in (files or {}).items():
            (beside / name).write_text(text, encoding="utf-8")
        for weights in beside.rglob("*.safetensors"):
            shutil.copymode(beside / "config.json", weights)  # else only their owner may read them
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise OpendilocoError(f"the model cannot be written to {folder} ({error}): make room there") from None
        raise
    try:
        if folder.exists():
            os.rename(folder, replaced)
        os.rename(beside, folder)
    except OSError as error:  # a mount point, or the folder that somebody works in
        if replaced.exists() and not folder.exists():
            os.rename(replaced, folder)
        shutil.rmtree(beside, ignore_errors=True)
        raise OpendilocoError(f"{folder} cannot be replaced ({error.strerror}): name a folder in it") from None
    shutil.rmtree(replaced, ignore_errors=True)


def load_model(folder: Path) -> tuple[PreTrainedModel, Tokenizer]:
    """A saved model (CPU, fp32, in evaluation mode) and its tokenizer.

    Raises:
        SettingsError: the folder holds no model with weights, or no tokenizer.
    """
    if not (folder / "config.json").is_file() or not has_weights(str(folder)):
        inside = folder / "model"  # of a worker's folder
        cure = f"name {inside}" if (inside / "config.json").is_file() else "name one that training wrote"
        raise SettingsError(f"{folder} holds no model (config.json and weights): {cure}")
    model = from_weights(str(folder), str(folder))
    return model.eval(), load_saved_tokenizer(folder)


def _edit_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file, if there is one."""
    if path.is_file():
        content: dict[str, Any] = json.loads(path.read_text())
        path.write_text(json.dumps(content | values, indent=2) + "\n")
