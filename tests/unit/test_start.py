"""What a worker finds out before it goes on the network, and how it leaves while it validates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.evaluate import validation_loss
from opendiloco.leave import Leave
from opendiloco.text import check_source
from opendiloco.trainer import check_folder


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
