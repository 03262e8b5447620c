"""Checkpoints: training goes on from one bit for bit, and one is there whole or not at all."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opendiloco.checkpoint import Checkpoint, CheckpointWriter, checkpoints, load_checkpoint
from opendiloco.codec import get_codec
from opendiloco.config import CheckpointConfig, ComputeConfig, Contract, LogConfig, PeerConfig
from opendiloco.errors import SettingsError
from opendiloco.metrics import MetricsLog, read_metrics
from opendiloco.rounds import Position
from opendiloco.settings import Settings
from opendiloco.simulated import SimulatedGroup
from opendiloco.worker import Worker

CONTRACT = Contract.model_validate(
    {
        "run": {"rounds": 4},
        "data": {"seq_len": 16, "validation_sequences": 4},
        "inner": {"steps": 3, "batch_size": 2, "warmup_steps": 4},
    }
)


def train(
    folder: Path,
    *,
    rounds: int | None = None,
    steps: int | None = None,
    resume: str | None = None,
    every_rounds: int = 1,
    contract: Contract = CONTRACT,
    precision: Any = "fp32",
) -> list[tuple[int, float]]:
    """Train alone, until the end or until so many rounds or steps are done; returns step and loss of all steps."""
    folder.mkdir(exist_ok=True)
    peer = PeerConfig(
        compute=ComputeConfig(threads=1, precision=precision),
        checkpoint=CheckpointConfig(every_rounds=every_rounds),
        log=LogConfig(every_steps=1),
    )
    writer = CheckpointWriter(folder / "checkpoints", keep=2)
    checkpoint = load_checkpoint(resume, folder, contract=contract.digest) if resume else None
    workers: list[Worker] = []

    def leaving() -> bool:
        return bool(workers) and (workers[0].optimizer.round == rounds or workers[0].optimizer.global_step == steps)

    with MetricsLog(folder / "metrics.jsonl", "a") as metrics:
        swarm = SimulatedGroup(["a"], get_codec("int8")).member("a")
        workers.append(
            Worker(
                Settings(contract, peer),
                swarm,
                metrics,
                leaving=leaving,
                checkpoint=checkpoint,
                writer=writer,
            )
        )
        workers[0].train()
    writer.close()
    events = read_metrics(folder / "metrics.jsonl")
    return [(event["global_inner_step"], event["loss"]) for event in events if event["event"] == "inner_step"]


def test_a_worker_that_resumes_has_the_loss_curve_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    assert train(tmp_path / "cut", rounds=2) == whole[:6]
    assert train(tmp_path / "cut", resume="latest") == whole
    hashes = [
        [event["params_hash"] for event in read_metrics(tmp_path / name / "metrics.jsonl") if event["event"] == "round"]
        for name in ("whole", "cut")
    ]
    assert hashes[0] == hashes[1]
    assert [path.name for path in checkpoints(tmp_path / "cut" / "checkpoints")] == ["round-000003", "round-000004"]


def test_a_worker_that_left_in_mid_phase_reads_again_what_is_in_no_model(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    cut = train(tmp_path / "cut", steps=8, every_rounds=100)
    assert cut == whole[:8]
    again = train(tmp_path / "cut", resume="latest")[8:]
    assert [step for step, _ in again] == [6, 7, 8, 9, 10, 11]
    assert again[0] == whole[6]  # the same batch, from the same parameters


def test_the_loss_scale_and_muons_momentum_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.lossscale.GROWTH_STEPS", 4)  # one growth before the cut, at an odd step
    contract = CONTRACT.model_copy(update={"inner": CONTRACT.inner.model_copy(update={"optimizer": "muon"})})
    whole = train(tmp_path / "whole", contract=contract, precision="fp16")
    assert train(tmp_path / "cut", rounds=2, contract=contract, precision="fp16") == whole[:6]
    inner = load_checkpoint("latest", tmp_path / "cut", contract=contract.digest)
    assert inner is not None
    assert inner.inner["loss_scale"]["value"] != 2.0**16  # it has moved
    assert train(tmp_path / "cut", resume="latest", contract=contract, precision="fp16") == whole


def write(
    folder: Path,
    round: int,
    theta: torch.Tensor | None = None,
    *,
    keep: int = 2,
    inner: dict[str, Any] | None = None,
    contract: str = "cd" * 32,
) -> None:
    writer = CheckpointWriter(folder, keep=keep)
    vectors = {"theta": torch.ones(3) if theta is None else theta, "momentum": torch.zeros(3)}
    position = Position(round, "ab" * 32, "", 5)
    writer.write(Checkpoint(contract, position, vectors, inner or {"state": {}}, {"at": 1}, torch.get_rng_state()))
    writer.close()


def test_the_newest_checkpoint_is_the_one_with_the_highest_round(tmp_path: Path) -> None:
    for round in (9, 10, 11):
        write(tmp_path / "checkpoints", round, keep=3)
    found = load_checkpoint("latest", tmp_path, contract="cd" * 32)
    assert found is not None
    assert found.position == Position(11, "ab" * 32, "", 5)


def test_checkpoints_of_an_earlier_run_do_not_push_out_those_of_this_one(tmp_path: Path) -> None:
    for contract, round in (("ef" * 32, 9), ("ef" * 32, 12), ("cd" * 32, 1), ("cd" * 32, 2), ("cd" * 32, 3)):
        write(tmp_path / "checkpoints", round, contract=contract)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == [
        f"round-{round:06d}" for round in (2, 3, 9, 12)
    ]
    found = load_checkpoint("latest", tmp_path, contract="cd" * 32)
    assert found is not None
    assert found.position.round == 3


def test_a_state_that_is_not_finite_is_not_written_over_a_good_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, torch.tensor([1.0, torch.nan, 1.0]))
    assert [path.name for path in checkpoints(tmp_path)] == ["round-000001"]


def test_a_folder_that_cannot_be_written_costs_the_checkpoint_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    write(tmp_path / "checkpoints", 1)
    assert "training goes on" in caplog.text


@pytest.mark.parametrize("file", ["outer.safetensors", "inner.pt"])
def test_a_full_disk_costs_the_checkpoint_only_and_leaves_no_half_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    """A limit on the size of files is what a full disk is to the one that writes."""
    write(tmp_path, 1)
    large = torch.ones(100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        if file == "inner.pt":
            write(tmp_path, 2, inner={"state": {0: {"exp_avg": large}}})
        else:
            write(tmp_path, 2, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "training goes on, earlier checkpoints are whole" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001"]
    write(tmp_path, 3)
    assert [path.name for path in checkpoints(tmp_path)] == ["round-000001", "round-000003"]


def test_what_a_killed_worker_left_half_written_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".round-000007.4242").mkdir()
    (tmp_path / ".round-000007.4242" / "outer.safetensors").write_bytes(b"half")
    write(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001"]


def cut(path: Path) -> None:
    path.write_bytes(b"{cut")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def leave_out_a_value(path: Path) -> None:
    meta = json.loads(path.read_text()) if path.suffix == ".json" else {}
    path.write_text(json.dumps({**meta, "data": None}))


def nest_deeply(path: Path) -> None:
    path.write_text("[" * 200_000)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, leave_out_a_value, nest_deeply])
@pytest.mark.parametrize("file", ["outer.safetensors", "inner.pt", "meta.json"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], None]
) -> None:
    write(tmp_path / "checkpoints", 1)
    write(tmp_path / "checkpoints", 2)
    damage(tmp_path / "checkpoints" / "round-000002" / file)
    found = load_checkpoint("latest", tmp_path, contract="cd" * 32)
    assert found is not None
    assert found.position.round == 1
    assert "round-000002 is damaged" in caplog.text
    assert "trying round-000001" in caplog.text


def test_other_folders_beside_the_checkpoints_are_none_of_them(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 1)
    for name in ("round-abc", "round-000002-copy", "round-"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "meta.json").write_text("{}")
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["round-000001"]


def test_half_a_checkpoint_is_passed_over_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "checkpoints", 1)
    write(tmp_path / "checkpoints", 2)
    (tmp_path / "checkpoints" / "round-000002" / "meta.json").unlink()
    found = load_checkpoint("latest", tmp_path, contract="cd" * 32)
    assert found is not None
    assert found.position.round == 1
    assert "round-000002 is damaged" in caplog.text


def test_no_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    assert load_checkpoint("latest", tmp_path, contract="cd" * 32) is None


def test_a_bare_name_that_is_no_folder_here_is_looked_for_in_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, here = tmp_path / "out", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for round in (3, 6):
        write(out / "checkpoints", round)
    found = load_checkpoint("round-000003", out, contract="cd" * 32)
    assert found is not None
    assert found.position.round == 3
    with pytest.raises(SettingsError) as caught:
        load_checkpoint("round-000099", out, contract="cd" * 32)
    assert str(caught.value) == (
        f"--resume round-000099: {out}/checkpoints/round-000099 is no checkpoint: "
        f"name a folder checkpoints/round-NNNNNN (in {out}/checkpoints: round-000003, round-000006)"
    )
    write(here, 5)
    found = load_checkpoint("round-000005", out, contract="cd" * 32)
    assert found is not None
    assert found.position.round == 5


def test_what_is_no_checkpoint_of_this_run_is_refused_with_the_cure(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 1)
    path = tmp_path / "checkpoints" / "round-000001"
    with pytest.raises(SettingsError, match=r"belongs to run contract cdcdcdcdcdcd, this run has efefefefefef"):
        load_checkpoint(str(path), tmp_path, contract="ef" * 32)
    (path / "outer.safetensors").write_bytes(b"cut")
    with pytest.raises(SettingsError, match="is damaged"):
        load_checkpoint(str(path), tmp_path, contract="cd" * 32)
    with pytest.raises(SettingsError, match="is no checkpoint"):
        load_checkpoint(str(tmp_path / "nowhere"), tmp_path, contract="cd" * 32)
    with pytest.raises(SettingsError, match=r"File name too long: name a folder checkpoints/round-NNNNNN"):
        load_checkpoint("x" * 5000, tmp_path, contract="cd" * 32)
