"""What a worker finds out before it goes on the network, and how it leaves while it validates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.evaluate import validation_loss
from opendiloco.leave import Leave
from opendiloco.text import check_source
from opendiloco.trainer import check_folder, warn_of_earlier_life


@pytest.mark.parametrize("name", ["checkpoints", "model", "roundlog"])
def test_a_file_in_the_place_of_a_folder_is_named_before_training(tmp_path: Path, name: str) -> None:
    check_folder(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(SettingsError, match=f"holds a file named {name}: move it"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    "source", ["text:/nowhere/at/all", "jsonl:/nowhere", "parquet:/nowhere", "csv:/nowhere", "text:"]
)
def test_a_source_that_is_not_there_is_named_without_reading_anything(source: str) -> None:
    with pytest.raises(SettingsError, match=r"data\.source is"):
        check_source(DataConfig(source=source))


def test_leaving_ends_a_validation_between_two_batches_and_the_model_trains_on() -> None:
    model = nn.Linear(1, 1)
    model.train()

    def leave() -> None:
        raise Leave

    with pytest.raises(Leave):
        validation_loss(model, [torch.zeros(1, 4, dtype=torch.int64)], between=leave)
    assert model.training


@pytest.mark.parametrize(
    ("resume", "kept", "line"),
    [
        (None, (), ""),
        (
            None,
            ("checkpoints/round-000012/meta.json",),
            r"before \(newest checkpoint: round-000012\), and",
        ),
        (
            None,
            ("roundlog/round-3",),
            "was a worker's folder before, and the run starts from the beginning",
        ),
        ("latest", (), "--resume latest: .* holds no checkpoint, this worker starts from the beginning"),
    ],
)
def test_a_run_that_begins_anew_in_a_used_folder_says_so(
    resume: str | None, kept: tuple[str, ...], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    warn_of_earlier_life(tmp_path, resume)
    assert len(caplog.messages) == bool(line)
    assert re.search(line, " ".join(caplog.messages))
