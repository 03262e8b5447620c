"""The command `export`: the outer parameters of a worker's folder as a Hugging Face folder with a model card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from opendiloco.card import model_files, read_record
from opendiloco.checkpoint import Checkpoint, checkpoints, load_checkpoint
from opendiloco.config import Contract
from opendiloco.errors import SettingsError
from opendiloco.flat import FlatLayout, scatter, trainable_parameters
from opendiloco.model import build_model, check_model_folder, count_parameters, load_model, save_model
from opendiloco.outer import OuterState, params_hash
from opendiloco.rounds import Position
from opendiloco.settings import load_settings
from opendiloco.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class _Found:
    """The outer parameters that are exported, and where they come from."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    position: Position | None
    path: Path


def run_export(out: Path, hf_dir: Path, *, checkpoint: str | None, dtype: str) -> int:
    """Write the outer parameters in a worker's folder `out` to `hf_dir`, complete or not at all.

    Args:
        checkpoint: a folder, the name of one in `out`, or `latest`; None takes the model that training ended with,
            where there is one, else the newest checkpoint.
        dtype: fp32, bf16 or fp16.

    Raises:
        SettingsError: what is asked for is not there, is damaged, or does not fit the run contract beside it.
    """
    if dtype not in DTYPES:
        raise SettingsError(f"--dtype is {dtype}: use {', '.join(DTYPES)}")
    contract = _contract_of(out)
    target = hf_dir.resolve()
    if target == (out / "model").resolve():
        raise SettingsError(f"HF_DIR is {hf_dir}, the folder that is exported: name another one")
    check_model_folder(target)
    found = _find(out, contract, checkpoint)
    model = _converted(found.model, dtype)
    files = model_files(
        contract, found.position, parameters=count_parameters(model), metrics=[out / "metrics.jsonl"], dtype=dtype
    )
    save_model(model, found.tokenizer, target, files=files)
    stands = "an unknown round" if found.position is None else f"round {found.position.round}"
    print(f"exported {stands} of {contract.run.rounds} from {found.path} to {hf_dir} as {dtype}")
    return 0


def _contract_of(out: Path) -> Contract:
    if not out.is_dir():
        raise SettingsError(f"OUT_DIR is {out}, but there is no such folder: name the --out of a worker")
    if not (out / "run.toml").is_file():
        raise SettingsError(f"OUT_DIR is {out}, which holds no run.toml: name the --out of a worker")
    return load_settings(out / "run.toml").contract


def _find(out: Path, contract: Contract, checkpoint: str | None) -> _Found:
    if checkpoint is None and _has_final_model(out, contract):
        return _from_model(out / "model")
    folder = out / "checkpoints"
    asked = checkpoint or "latest"
    if asked in (path.name for path in folder.glob("*")):  # before a folder of that name here
        asked = str(folder / asked)
    found = load_checkpoint(asked, out, contract=contract.digest, option="--checkpoint")
    if found is None:
        workers = sorted(path.parent for path in out.glob("*/run.toml"))
        cure = f"name a worker's folder, such as {workers[0]}" if workers else "set checkpoint.every_rounds in training"
        also = "" if checkpoint else "no model and "
        raise SettingsError(f"OUT_DIR is {out}, which holds {also}no checkpoint: {cure}")
    path = folder / f"round-{found.position.round:06d}" if asked == "latest" else Path(asked)
    return _from_checkpoint(found, contract, path=path)


def _has_final_model(out: Path, contract: Contract) -> bool:
    """Whether training ended with the model that is there, and did not go on afterwards."""
    folder = out / "model"
    if not (folder / "config.json").is_file():
        return False
    record, found = read_record(folder), checkpoints(out / "checkpoints")
    if record is None:
        return True
    if record.contract != contract.digest:
        if found:
            return False
        raise SettingsError(
            f"{folder} belongs to run contract {record.contract[:12]}, but run.toml beside it is "
            f"{contract.digest[:12]}: name the folder of the run that trained it"
        )
    return not found or int(found[-1].name.removeprefix("round-")) <= record.position.round


def _from_model(folder: Path) -> _Found:
    try:
        model, tokenizer = load_model(folder)
    except SettingsError as error:
        raise SettingsError(f"{error}: try --checkpoint latest") from None
    record = read_record(folder)
    return _Found(model, tokenizer, record.position if record is not None else None, folder)


def _from_checkpoint(checkpoint: Checkpoint, contract: Contract, *, path: Path) -> _Found:
    """The model of the run contract, with theta in place of its initial parameters."""
    tokenizer = load_tokenizer(contract.data.tokenizer)
    model = build_model(
        contract.model, vocab_size=tokenizer.vocab_size, seq_len=contract.data.seq_len, seed=contract.run.seed
    )
    theta, numel = checkpoint.outer["theta"], FlatLayout.of(model).numel
    if theta.numel() != numel:
        raise SettingsError(
            f"{path} holds {theta.numel()} parameters, but model.name {contract.model.name} has {numel} here: use the "
            "model and the versions that the run was trained with"
        )
    scatter(theta, trainable_parameters(model))
    state = OuterState(theta, checkpoint.outer["momentum"], checkpoint.outer.get("second_moment", theta.new_empty(0)))
    return _Found(model.eval(), tokenizer, replace(checkpoint.position, params_hash=params_hash(state)), path)


def _converted(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    model.to(DTYPES[dtype])
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise SettingsError(f"--dtype {dtype} has no room for values of {name}: use bf16 or fp32")
    return model
