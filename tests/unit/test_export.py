"""`opendiloco export`: the outer parameters, bit for bit, in a folder that transformers loads, or one line why not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from opendiloco.checkpoint import CheckpointWriter, load_checkpoint
from opendiloco.codec import get_codec
from opendiloco.config import CheckpointConfig, ComputeConfig, Contract, PeerConfig
from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.export import run_export
from opendiloco.metrics import MetricsLog, read_metrics
from opendiloco.settings import Settings, write_toml
from opendiloco.simulated import SimulatedGroup
from opendiloco.worker import Worker

CONTRACT = Contract.model_validate(
    {
        "run": {"id": "exported", "rounds": 3},
        "data": {"source": f"text:{json.__file__}", "seq_len": 16, "validation_sequences": 2},
        "inner": {"steps": 1, "batch_size": 2, "warmup_steps": 0},
    }
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a worker that has finished three rounds, with a checkpoint of each."""
    out = tmp_path_factory.mktemp("worker")
    peer = PeerConfig(compute=ComputeConfig(device="cpu", threads=1), checkpoint=CheckpointConfig(every_rounds=1))
    writer = CheckpointWriter(out / "checkpoints", keep=3)
    write_toml(out / "run.toml", CONTRACT)
    with MetricsLog(out / "metrics.jsonl", "a") as metrics:
        swarm = SimulatedGroup(["a"], get_codec("int8")).member("a")
        worker = Worker(Settings(CONTRACT, peer), swarm, metrics, writer=writer)
        worker.train()
        worker.save(out / "model")
    writer.close()
    return out


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "worker"))


def export(out: Path, hf_dir: Path, checkpoint: str | None = None, dtype: str = "fp32") -> None:
    assert run_export(out, hf_dir, checkpoint=checkpoint, dtype=dtype) == 0


def theta_of(out: Path, round: int) -> Tensor:
    found = load_checkpoint(str(out / f"checkpoints/round-{round:06d}"), out, contract=CONTRACT.digest)
    assert found is not None
    return found.outer["theta"]


def parameters_of(hf_dir: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def round_line(out: Path, round: int) -> dict[str, object]:
    return next(
        line for line in read_metrics(out / "metrics.jsonl") if line["event"] == "round" and line["round"] == round
    )


# --- what is written -----------------------------------------------------------------------------------


def test_exported_folder_is_all_that_transformers_needs(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer("def ", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=3, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert written.shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "hf").iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("round", [1, 2, 3])
def test_exported_parameters_are_theta_bit_for_bit(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], round: int
) -> None:
    name = f"round-{round:06d}"
    export(trained, tmp_path / "hf", checkpoint=name)
    assert torch.equal(parameters_of(tmp_path / "hf"), theta_of(trained, round))
    place = trained / "checkpoints" / name
    assert capsys.readouterr().out == f"exported round {round} of 3 from {place} to {tmp_path / 'hf'} as fp32\n"


def test_model_and_checkpoint_of_the_same_round_give_the_same_folder(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "model")
    export(trained, tmp_path / "checkpoint", checkpoint="latest")
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    for name in set(files) - {"generation_config.json"}:  # which says in other words that there is nothing special
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "checkpoint" / name).read_bytes(), name


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_smaller_number_formats_are_the_rounded_parameters(
    trained: Path, tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    export(trained, tmp_path / "hf", checkpoint="round-000002", dtype=dtype)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {expected}
    assert torch.equal(parameters_of(tmp_path / "hf"), theta_of(trained, 2).to(expected).float())
    assert f"parameters in {dtype}" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.parametrize("checkpoint", [None, "round-000002"])
def test_card_has_lineage_and_hash_of_the_exported_round(trained: Path, tmp_path: Path, checkpoint: str | None) -> None:
    export(trained, tmp_path / "hf", checkpoint=checkpoint)
    line = round_line(trained, 2 if checkpoint else 3)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert str(line["lineage"]) in card
    assert str(line["params_hash"]) in card
    assert f"| rounds committed | {line['round']} of 3 |" in card
    assert f"| tokens trained on, by all workers together | {2 * 16 * (2 if checkpoint else 3)} |" in card


def test_training_leaves_the_same_card_in_its_model(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "hf")
    assert (trained / "model" / "README.md").read_bytes() == (tmp_path / "hf" / "README.md").read_bytes()


def test_a_model_that_was_exported_before_is_replaced(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "hf", checkpoint="round-000001", dtype="bf16")
    export(trained, tmp_path / "hf")
    assert torch.equal(parameters_of(tmp_path / "hf"), theta_of(trained, 3))


# --- which parameters ----------------------------------------------------------------------------------


def test_without_a_model_the_newest_whole_checkpoint_is_taken(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "model")
    (folder / "checkpoints/round-000003/outer.safetensors").write_bytes(b"cut")
    export(folder, tmp_path / "hf")
    assert "exported round 2 of 3" in capsys.readouterr().out
    assert torch.equal(parameters_of(tmp_path / "hf"), theta_of(folder, 2))


def test_a_model_that_training_went_on_from_is_not_the_newest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((folder / "model" / "diloco.json").read_text())
    (folder / "model" / "diloco.json").write_text(json.dumps(record | {"round": 2}))
    export(folder, tmp_path / "hf")
    assert f"exported round 3 of 3 from {folder / 'checkpoints/round-000003'}" in capsys.readouterr().out


def test_without_metrics_and_record_the_model_is_exported_and_its_round_unknown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "model" / "diloco.json").unlink()
    export(folder, tmp_path / "hf")
    assert "exported an unknown round of 3" in capsys.readouterr().out
    assert "committed" not in (tmp_path / "hf" / "README.md").read_text()


# --- what is refused -----------------------------------------------------------------------------------


def refusal(out: Path, hf_dir: Path, checkpoint: str | None = None, dtype: str = "fp32") -> str:
    """The one line; nothing is written."""
    existed = hf_dir.exists()
    with pytest.raises(SettingsError) as caught:
        run_export(out, hf_dir, checkpoint=checkpoint, dtype=dtype)
    assert "\n" not in str(caught.value)
    assert hf_dir.exists() == existed
    return str(caught.value)


def test_what_is_no_workers_folder_is_refused(trained: Path, tmp_path: Path) -> None:
    hf_dir = tmp_path / "hf"
    assert "there is no such folder: name the --out" in refusal(tmp_path / "nowhere", hf_dir)
    assert "holds no run.toml: name the --out" in refusal(tmp_path, hf_dir)
    write_toml(tmp_path / "run.toml", CONTRACT)
    assert "no model and no checkpoint: set checkpoint.every_rounds" in refusal(tmp_path, hf_dir)
    (tmp_path / "worker-0").mkdir()
    write_toml(tmp_path / "worker-0" / "run.toml", CONTRACT)
    assert f"name a worker's folder, such as {tmp_path / 'worker-0'}" in refusal(tmp_path, hf_dir)


def test_a_checkpoint_that_is_not_there_or_damaged_is_refused(folder: Path, tmp_path: Path) -> None:
    hf_dir = tmp_path / "hf"
    there = folder / "checkpoints"
    assert refusal(folder, hf_dir, "round-9") == (
        f"--checkpoint round-9: {there / 'round-9'} is no checkpoint: name a folder checkpoints/round-NNNNNN "
        f"(in {there}: round-000001, round-000002, round-000003)"
    )
    assert "File name too long: name a folder" in refusal(folder, hf_dir, "x" * 5000)
    (folder / "checkpoints/round-000002/outer.safetensors").write_bytes(b"cut")
    assert "--checkpoint " in (line := refusal(folder, hf_dir, "round-000002"))
    assert "is damaged" in line
    (folder / "model/model.safetensors").write_bytes(b"cut")
    assert refusal(folder, hf_dir).endswith(": try --checkpoint latest")


def test_a_contract_of_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    other = CONTRACT.model_copy(update={"run": CONTRACT.run.model_copy(update={"seed": 5})})
    write_toml(folder / "run.toml", other)
    assert f"belongs to run contract {CONTRACT.digest[:12]}" in refusal(folder, tmp_path / "hf")
    shutil.rmtree(folder / "checkpoints")
    assert "name the folder of the run that trained it" in refusal(folder, tmp_path / "hf")


def test_a_theta_that_is_not_the_models_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.export.FlatLayout.of", lambda model: type("Layout", (), {"numel": 7}))
    line = refusal(folder, tmp_path / "hf", "latest")
    assert "parameters, but model.name tiny has 7 here: use the model and the versions" in line


def test_a_place_that_holds_something_else_is_refused_before_anything_is_loaded(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "holds no model that could be replaced" in refusal(trained, tmp_path)
    assert "is a file: name a folder" in refusal(trained, tmp_path / "thesis.txt")
    assert "is not empty" in refusal(trained, trained)
    assert "the folder that is exported" in refusal(trained, trained / "model")
    assert "--dtype is int8: use fp32, bf16, fp16" in refusal(trained, tmp_path / "hf", dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_values_that_fp16_has_no_room_for_are_refused(folder: Path, tmp_path: Path) -> None:
    file = folder / "model" / "model.safetensors"
    save_file({name: tensor + 1e5 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    assert "--dtype fp16 has no room for values of model.embed" in refusal(folder, tmp_path / "hf", dtype="fp16")


@pytest.mark.parametrize("refused", ["target", "new"])
def test_a_folder_that_cannot_be_replaced_is_one_line_and_stays_as_it_was(
    trained: Path, tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a mount point, which cannot be renamed (EBUSY), or whose folder takes no new name."""
    export(trained, tmp_path / "hf", "round-000001")
    before = {path: path.read_bytes() for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    rename = os.rename

    def busy(source: Path, target: Path) -> None:
        if source.name == {"target": "hf", "new": ".hf.new"}[refused]:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), source)
        rename(source, target)

    monkeypatch.setattr("opendiloco.model.os.rename", busy)
    with pytest.raises(OpendilocoError) as caught:
        export(trained, tmp_path / "hf")
    assert str(caught.value) == f"{tmp_path / 'hf'} cannot be replaced (Device or resource busy): name a folder in it"
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert {path: path.read_bytes() for path in (tmp_path / "hf").rglob("*") if path.is_file()} == before
