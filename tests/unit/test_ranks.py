"""What a process learns from torchrun, and the settings that several processes cannot have."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from opendiloco.config import ComputeConfig, Contract, InnerConfig
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.ranks import Ranks, check_batch


@pytest.mark.parametrize(
    ("environment", "index", "size"),
    [
        ({}, 0, 1),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 0, 1),
        ({"WORLD_SIZE": "4"}, 0, 1),  # of something that is not torchrun
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, 3, 4),
    ],
)
def test_torchruns_environment_says_which_process_this_is(environment: dict[str, str], index: int, size: int) -> None:
    ranks = Ranks.from_environment(environment)
    assert (ranks.index, ranks.size, ranks.is_first) == (index, size, index == 0)


def test_a_batch_that_processes_cannot_share_equally_is_refused() -> None:
    contract = Contract(inner=InnerConfig(batch_size=8))
    check_batch(contract, Ranks(0, 4))
    with pytest.raises(SettingsError, match=r"inner.batch_size is 8 and this worker has 3 processes: start"):
        check_batch(contract, Ranks(0, 3))


def test_every_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Ranks(5, 8, 1).own_device(ComputeConfig()).device == "cuda:1"
    assert Ranks(5, 8, 1).own_device(ComputeConfig(device="cpu")).device == "cpu"
    assert Ranks().own_device(ComputeConfig(device="cuda:3")).device == "cuda:3"
    with pytest.raises(SettingsError, match=r"compute.device is cuda:0 and this worker has 8 processes: set it to"):
        Ranks(5, 8, 1).own_device(ComputeConfig(device="cuda:0"))


def test_a_lost_process_is_named_without_the_librarys_own_lines() -> None:
    lost = "[/a/b/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1. This is typically caused by\nmore"
    with pytest.raises(SwarmError) as caught, Ranks(0, 2) as ranks:
        ranks.together(partial(_fail, RuntimeError(lost)))
    assert re.fullmatch(
        r"another of this worker's 2 processes has ended \(Connection closed by peer \[127.0.0.1\]:1\): see .*",
        str(caught.value),
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), SettingsError("no"), KeyError("no")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)), Ranks(0, 2) as ranks:
        ranks.together(partial(_fail, error))


def _fail(error: Exception) -> None:
    raise error
