"""Models: presets and Hugging Face models, the loss, the saved folder, generated text."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from opendiloco.config import ModelConfig
from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.separation import separated_loss
from opendiloco.tokenizer import Tokenizer, load_saved_tokenizer

INIT_STD = 0.02
"""Standard deviation of the initial matrices of a preset."""

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


_ONE_AT_A_TIME = threading.Lock()  # torch's random generator belongs to the whole process


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model; the names are those of transformers.LlamaConfig."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = True


PRESETS = {
    # 0.98M parameters with the vocabulary of bytes: trains on a laptop's CPU.
    "tiny": Shape(4, 128, 448, 4, 4, 32),
    "14m": Shape(8, 256, 640, 4, 4, 64),
    # DiLoCo, arXiv:2311.08105: layers, d, heads, K/V size. The gated MLP has 8/3 d instead of 4 d (same number
    # of parameters). Tied embeddings, and heads of 128 at 400m, give the sizes of the paper's names.
    "60m": Shape(3, 896, 2432, 16, 16, 64),
    "150m": Shape(12, 896, 2432, 16, 16, 64),
    "400m": Shape(12, 1536, 4096, 12, 12, 128),
    # OpenDiLoCo, arXiv:2407.07852: the shape of TinyLlama.
    "1b": Shape(22, 2048, 5632, 32, 4, 64, tie_word_embeddings=False),
}
"""Parameter counts in the names hold for a vocabulary of 32,000."""


def build_model(config: ModelConfig, *, vocab_size: int, seq_len: int, seed: int) -> PreTrainedModel:
    """The model of model.name on the CPU in fp32, in training mode.

    The parameters depend on the arguments alone. A preset's are bit-identical on every machine, those of
    `hf:` without weights on machines with the same torch and the same kind of CPU. The global random state
    stays as it was.

    Args:
        vocab_size: number of the tokenizer's ids.
        seq_len: tokens per sequence.
    Raises:
        SettingsError: unknown name; no such model; vocabulary or context of an `hf:` model too small.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # of the CPU; torch.manual_seed would change all devices
        if config.name in PRESETS:
            model = LlamaForCausalLM(preset_config(config.name, vocab_size=vocab_size, seq_len=seq_len))
            _initialize(model.float(), seed)
        elif config.name.startswith("hf:"):
            model = _hugging_face_model(config.name, vocab_size=vocab_size, seq_len=seq_len)
        else:
            raise SettingsError(f"model.name is {config.name!r}: use {', '.join(PRESETS)} or hf:NAME_OR_PATH")
    model.config.use_cache = False  # training never looks back at keys and values
    return model.train()


def preset_config(name: str, *, vocab_size: int, seq_len: int) -> LlamaConfig:
    """The configuration of a preset: names as in `PRESETS`."""
    return LlamaConfig(
        **asdict(PRESETS[name]),
        vocab_size=vocab_size,
        max_position_embeddings=seq_len,
        initializer_range=INIT_STD,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def causal_lm_loss(model: nn.Module, tokens: Tensor, *, end_id: int | None = None) -> Tensor:
    """Mean cross entropy (nats) of each next token, fp32 scalar.

    Args:
        tokens: int64 [batch, seq_len] on the model's device; all of it text, no padding. The targets are
            tokens 1 to seq_len - 1 of each sequence.
        end_id: last token of each document, where documents are to be kept apart; their first tokens are no targets.
    """
    if end_id is not None:
        return separated_loss(model, tokens, end_id)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]  # [batch, seq_len - 1, vocab]
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def check_model_folder(folder: Path) -> None:
    """Raise SettingsError where a model cannot be saved, because something else is there."""
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{folder} is a file: name a folder")
    if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty and holds no model that could be replaced: name another one")


def save_model(
    model: PreTrainedModel, tokenizer: Tokenizer, folder: Path, *, files: Mapping[str, str] | None = None
) -> None:
    """Write a Hugging Face folder (safetensors) with its tokenizer: complete, or as if nothing happened.

    A model folder that is there already is replaced. `files` are other ones that belong there: name -> text.
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
        with _without_progress_bars():
            model.save_pretrained(beside)
        tokenizer.save(beside)
        for name in ("config.json", "generation_config.json"):
            _edit_json(beside / name, use_cache=True, eos_token_id=tokenizer.end_id)
        for name, text in (files or {}).items():
            (beside / name).write_text(text, encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise OpendilocoError(f"the model cannot be written to {folder} ({error}): make room there") from None
        raise
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(beside, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def load_model(folder: Path) -> tuple[PreTrainedModel, Tokenizer]:
    """A saved model (CPU, fp32, in evaluation mode) and its tokenizer.

    Raises:
        SettingsError: the folder holds no model with weights, or no tokenizer.
    """
    if not (folder / "config.json").is_file() or not _has_weights(folder):
        raise SettingsError(f"{folder} holds no model (config.json and weights): name one that training wrote")
    model = _load(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), name=str(folder))
    return model.eval(), load_saved_tokenizer(folder)


def generate_text(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Continue a prompt: the new text alone. Ends early where the model ends the document.

    Temperature 0 takes the likeliest token each time; above it, `seed` decides. The model sees at most its
    own context: when that is full, the older half is dropped.
    """
    limit = _context_tokens(model.config) or 2**20
    device = next(model.parameters()).device
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_id]
    context, new = prompt_ids, list[int]()
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        while len(new) < max_new_tokens and tokenizer.end_id not in new:
            if len(context) >= limit:
                context = context[-max(1, limit // 2) :]
            count = min(max_new_tokens - len(new), max(1, limit - len(context)))
            chunk = _generate(model, context, count=count, temperature=temperature, end_id=tokenizer.end_id)
            new += chunk
            context = context + chunk
    model.train(was_training)
    return tokenizer.decode(new)


def _generate(model: PreTrainedModel, context: list[int], *, count: int, temperature: float, end_id: int) -> list[int]:
    """At most `count` ids that follow the context; `end_id` comes last, if at all."""
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0}
    settings = GenerationConfig(
        max_new_tokens=count,
        eos_token_id=end_id,
        pad_token_id=end_id,
        use_cache=True,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    ids = torch.tensor([context], device=next(model.parameters()).device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    new: list[int] = output[0, len(context) :].tolist()
    return new


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws a bar per saved or loaded file, even of a small model: not into a worker's log."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@torch.no_grad()
def _initialize(model: nn.Module, seed: int) -> None:
    """Matrices: mean 0, deviation INIT_STD; vectors (norms): 1.

    torch's normal_ gives other last bits on CPUs with other vector units. The sum of four 16-bit numbers
    is near enough to a normal distribution (ends at 3.5 deviations) and the same bits everywhere.
    """
    generator = np.random.PCG64(seed)
    scale = INIT_STD / np.sqrt(4 * (2.0**32 - 1) / 12)  # variance of one 16-bit number: (2**32 - 1) / 12
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        words = generator.random_raw(parameter.numel()).astype("<u8").view("<u2").reshape(-1, 4)
        sums = words.sum(axis=1, dtype=np.int64) - 2 * (2**16 - 1)
        parameter.copy_(torch.from_numpy((sums * scale).astype(np.float32)).view_as(parameter))


def _hugging_face_model(name: str, *, vocab_size: int, seq_len: int) -> PreTrainedModel:
    """The model of `hf:NAME_OR_PATH`: with its weights, or newly initialized if a folder has only a config."""
    place = Path(name.removeprefix("hf:")).expanduser()
    source = str(place) if place.is_dir() else name.removeprefix("hf:")
    if not place.is_dir() and (place.is_absolute() or source.startswith((".", "~"))):
        raise SettingsError(f"model.name is {name}, but there is no such folder: correct the path")
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        where = "holds no model" if place.is_dir() else "is no folder here and was not found on the hub"
        raise SettingsError(
            f"model.name is {name}, which {where}: name a folder with a config.json of a causal language model"
        ) from error
    known = getattr(config.get_text_config(), "vocab_size", None)
    if known is not None and known < vocab_size:
        raise SettingsError(
            f"model.name is {name} with a vocabulary of {known}, but data.tokenizer has {vocab_size} ids: use the "
            "model's own tokenizer"
        )
    context = _context_tokens(config)
    if context is not None and context < seq_len:
        raise SettingsError(
            f"data.seq_len is {seq_len}, but model.name {name} takes at most {context} tokens: lower data.seq_len"
        )
    if place.is_dir() and not _has_weights(place):
        return _load(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32), name=name)
    return _load(lambda: AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), name=name)


def _load(load: Callable[[], PreTrainedModel], *, name: str) -> PreTrainedModel:
    try:
        with _without_progress_bars():
            return load()
    except ValueError as error:
        raise SettingsError(f"{name} is no causal language model that transformers knows: name another") from error
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SettingsError(f"the weights of {name} cannot be read: {reason}") from error


def _context_tokens(config: Any) -> int | None:
    """Tokens the model can see at once; None if its configuration sets no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES)


def _edit_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file, if there is one."""
    if path.is_file():
        content: dict[str, Any] = json.loads(path.read_text())
        path.write_text(json.dumps(content | values, indent=2) + "\n")
