"""What a worker finds out before it goes on the network, and how it leaves while it validates."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from opendiloco.config import Contract, DataConfig, PeerConfig, RunConfig, SwarmConfig
from opendiloco.errors import SettingsError
from opendiloco.evaluate import validation_loss
from opendiloco.leave import Leave
from opendiloco.metrics import MetricsLog
from opendiloco.ranks import Ranks
from opendiloco.settings import Settings, write_toml
from opendiloco.text import check_source
from opendiloco.trainer import agree_on_contract, check_folder, check_owner, warn_of_earlier_life
from opendiloco.worker import Worker


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


def test_a_folder_with_the_work_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    mine, other = Contract(), Contract(run=RunConfig(id="other"))
    check_owner(tmp_path, mine)
    write_toml(tmp_path / "run.toml", other)
    check_owner(tmp_path, mine)  # nothing came of that start
    (tmp_path / "roundlog").mkdir()
    (tmp_path / "roundlog" / "round-3").write_text("")
    check_owner(tmp_path, other)
    with pytest.raises(SettingsError, match=r"folder of a worker of run other with another contract .*--resume latest"):
        check_owner(tmp_path, mine)


@pytest.mark.parametrize(("run_id", "named"), [("later", "later"), (None, "(any)")])
def test_joiner_says_how_long_it_waits_for_which_run_before_it_waits(
    run_id: str | None, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    theirs, heard = Contract(run=RunConfig(id="later")), list[list[str]]()

    def find_contract(_: str | None, *, wait_s: float, with_workers: bool = True) -> Contract | None:
        assert with_workers
        if wait_s == 0:
            return None
        assert wait_s == 7.5
        heard.append(list(caplog.messages))
        return theirs

    address = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"
    peer = PeerConfig(swarm=SwarmConfig(peers=(address,), startup_timeout_s=7.5))
    swarm = cast(Any, SimpleNamespace(find_contract=find_contract))
    found, has_brought_contract = agree_on_contract(Settings(Contract(), peer), swarm, run_id)
    assert (found.contract, has_brought_contract) == (theirs, False)
    assert heard == [[f"waiting up to 7.5 s for a worker of run {named}"]]


def test_who_brings_a_contract_compares_it_also_with_that_of_a_run_without_workers() -> None:
    theirs, asked = Contract(run=RunConfig(seed=7)), list[bool]()

    def find_contract(_: str | None, *, wait_s: float, with_workers: bool) -> Contract | None:
        asked.append(with_workers)
        return theirs

    swarm, mine = cast(Any, SimpleNamespace(find_contract=find_contract)), Settings(Contract(), PeerConfig())
    with pytest.raises(SettingsError, match="leave out --run"):
        agree_on_contract(replace(mine, has_run_file=True), swarm, None)
    assert asked == [False]


def test_processes_of_a_worker_meet_before_its_text_is_opened(tmp_path: Path) -> None:
    """So that where the text is wrong the others notice at once, instead of waiting for the first to come."""
    opened = []

    class Meeting(Ranks):
        def open(self, leaving: object = None) -> None:
            opened.append(self.index)

    contract = Contract(data=DataConfig(source=f"text:{tmp_path / 'nowhere'}"))
    with MetricsLog(tmp_path / "metrics.jsonl", "a") as metrics, pytest.raises(SettingsError, match=r"data\.source is"):
        Worker(Settings(contract, PeerConfig()), cast(Any, SimpleNamespace(lease=None)), metrics, ranks=Meeting(0, 2))
    assert opened == [0]
