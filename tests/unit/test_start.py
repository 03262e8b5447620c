"""What a worker finds out before it goes on the network, and how it leaves while it validates."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import nn

from opendiloco import trainer
from opendiloco.addresses import check_address_file, write_addresses
from opendiloco.config import Contract, DataConfig, InnerConfig, PeerConfig, RunConfig, SwarmConfig
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.evaluate import validation_loss
from opendiloco.leave import Leave
from opendiloco.metrics import MetricsLog
from opendiloco.ranks import Ranks
from opendiloco.settings import Settings, write_toml
from opendiloco.text import check_source
from opendiloco.trainer import agree_on_contract, warn_of_long_warmup
from opendiloco.worker import Worker


@pytest.mark.parametrize(
    ("path", "reason"), [("folder", "it is a folder"), ("file/below", "File exists"), ("x" * 300, "File name too long")]
)
def test_addresses_that_cannot_be_written_are_told_at_once_and_leave_nothing(
    tmp_path: Path, path: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for attempt in (check_address_file, partial(write_addresses, addresses=["a"])):
        with pytest.raises(SettingsError, match="name another one") as caught:
            attempt(tmp_path / path)
        assert re.search(f"{reason}|Is a directory|Not a directory", str(caught.value))
    assert sorted(tmp_path.rglob("*")) == before


def test_settings_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(SettingsError, match="choose another --out"):
        write_toml(tmp_path / "run.toml", Contract())
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_run_whose_warm_up_takes_most_of_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    steps = InnerConfig(steps=10, warmup_steps=20)
    warn_of_long_warmup(Contract(run=RunConfig(rounds=4), inner=steps))
    assert not caplog.messages
    warn_of_long_warmup(Contract(run=RunConfig(rounds=3), inner=steps))
    assert "is 20, and the whole run has 30 inner steps" in caplog.text


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


@pytest.fixture
def before_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Starts a worker that must not come as far as the network; gives the line it ends with."""

    def swarm(*_: object, **__: object) -> None:
        raise AssertionError("the network process is started")

    monkeypatch.setattr(trainer, "Swarm", swarm)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))

    def start(contract: Contract, *, out: Path = tmp_path / "out", resume: str | None = None) -> str:
        with pytest.raises(SettingsError) as caught:
            trainer.run_worker(Settings(contract, PeerConfig()), out, run_id=None, resume=resume, address_file=None)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return start


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("text:{tmp}/empty.txt", "has no text: name one that has some"),
        ("text:{tmp}/spaces.txt", "has no text: name one that has some"),
        ("text:{tmp}/nul.txt", "has no text: name one that has some"),
        ("text:{tmp}/folder", "that folder has no text files"),
        ("jsonl:{tmp}/folder", "that folder has no .jsonl or .json"),
        ("jsonl:{tmp}/empty.txt", "has no text"),
        (
            "jsonl:{tmp}/broken.jsonl",
            "cannot be read: .*broken.jsonl, after 0 rows: .*: correct that file, or leave it out",
        ),
        ("jsonl:{tmp}/nul.jsonl", "nul.jsonl cannot be read: "),
        ("jsonl:{tmp}/latin.jsonl", "latin.jsonl cannot be read: "),
        ("jsonl:{tmp}/body.jsonl", "data.text_field is 'text', but .* has the fields body: set it to"),
        ("jsonl:{tmp}/null.jsonl", "null.jsonl has no text"),
        ("parquet:{tmp}/empty.txt", "has no text"),
        ("parquet:{tmp}/empty.parquet", "empty.parquet has no text"),
        ("parquet:{tmp}/broken.jsonl", "broken.jsonl cannot be read: "),
        ("hf:{tmp}/set", "data.text_field is 'text', but .* has the fields body"),
        ("hf:", "use stdlib, text:PATH"),
        (" stdlib", "use stdlib, text:PATH"),
        ("text:" + "x" * 5000, "cannot be read: .* name too long"),
        ("text:{tmp}/short.txt", "has only 12 tokens in 1 documents, too few"),
        ("jsonl:{tmp}/short.jsonl", "has only 12 tokens in 1 documents, too few"),
    ],
)
def test_text_that_is_none_is_told_before_the_network_is_joined(
    source: str, line: str, tmp_path: Path, before_network: Callable[..., str]
) -> None:
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("hello world")
    (tmp_path / "short.jsonl").write_text('{"text": "hello world"}\n')
    (tmp_path / "spaces.txt").write_text(" \n" * 99)
    (tmp_path / "nul.txt").write_bytes(b"text\0")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{broken\n')
    (tmp_path / "nul.jsonl").write_bytes(b'{"text": "a"}\n\0\0\0\n')
    (tmp_path / "latin.jsonl").write_bytes('{"text": "caf\xe9"}\n'.encode("latin-1"))
    (tmp_path / "body.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "null.jsonl").write_text('{"text": null}\n' * 3)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").write_text('{"body": "a"}\n')
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "empty.parquet"
    )
    contract = Contract(data=DataConfig(source=source.format(tmp=tmp_path)))
    assert re.search(line, before_network(contract))
    assert not (tmp_path / "out").exists()


def test_files_that_may_not_be_read_are_told_before_the_network_is_joined(
    tmp_path: Path, before_network: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")

    def refuse(path: Path | str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    for place in (f"{tmp_path}/a.txt", str(tmp_path)):
        line = before_network(Contract(data=DataConfig(source=f"text:{place}")))
        assert line == (
            f"data.source text:{place} cannot be read: {place}: Permission denied: correct the path, or let this user "
            "read it"
        )


def test_work_of_another_run_and_a_missing_checkpoint_are_told_before_the_network_is_joined(
    tmp_path: Path, before_network: Callable[..., str]
) -> None:
    (tmp_path / "roundlog").mkdir()
    (tmp_path / "roundlog" / "round-3").write_text("")
    write_toml(tmp_path / "run.toml", Contract(run=RunConfig(id="other")))
    assert "is the folder of a worker of run other" in before_network(Contract(), out=tmp_path)
    missing = tmp_path / "checkpoints" / "round-000003"
    assert f"--resume {missing}: {missing} is no checkpoint: " in before_network(Contract(), resume=str(missing))


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
    found, has_company = agree_on_contract(Settings(Contract(), peer), swarm, run_id)
    assert (found.contract, has_company) == (theirs, True)
    assert heard == [[f"waiting up to 7.5 s for a worker of run {named}"]]


@pytest.mark.parametrize(("run_id", "named"), [(None, "mine"), ("theirs", "theirs")])
def test_a_run_id_among_the_settings_names_the_run_to_join(run_id: str | None, named: str) -> None:
    asked = list[str | None]()

    def find_contract(run_id: str | None, **_: object) -> Contract:
        asked.append(run_id)
        return Contract(run=RunConfig(id=named))

    address = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"
    peer = PeerConfig(swarm=SwarmConfig(peers=(address,)))
    explicit = frozenset({"run.id"}) if run_id is None else frozenset()
    mine = Settings(Contract(run=RunConfig(id="mine")), peer, explicit)
    agree_on_contract(mine, cast(Any, SimpleNamespace(find_contract=find_contract)), run_id)
    assert asked == [named]


def test_who_brings_a_contract_compares_it_also_with_that_of_a_run_without_workers() -> None:
    theirs, asked = Contract(run=RunConfig(seed=7)), list[bool]()

    def find_contract(_: str | None, *, wait_s: float, with_workers: bool) -> Contract | None:
        asked.append(with_workers)
        return theirs

    swarm, mine = cast(Any, SimpleNamespace(find_contract=find_contract)), Settings(Contract(), PeerConfig())
    with pytest.raises(SettingsError, match="leave out --run"):
        agree_on_contract(replace(mine, has_run_file=True), swarm, None)
    assert asked == [False]


@pytest.mark.parametrize("is_inhabited", [True, False])
def test_who_brings_the_contract_of_a_run_is_told_whether_anybody_is_left_in_it(
    is_inhabited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def find_contract(_: str | None, *, wait_s: float, with_workers: bool = True) -> Contract | None:
        return Contract() if is_inhabited or not with_workers else None

    swarm, mine = cast(Any, SimpleNamespace(find_contract=find_contract)), Settings(Contract(), PeerConfig())
    assert agree_on_contract(mine, swarm, None) == (mine, is_inhabited)
    assert caplog.messages[0].endswith(", where none of its workers is left") != is_inhabited


@pytest.mark.parametrize("resumes", [True, False])
def test_who_finds_nobody_is_told_of_the_folder_that_it_could_go_on_with(tmp_path: Path, resumes: bool) -> None:
    write_toml(tmp_path / "run.toml", Contract())
    address = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"
    peer = PeerConfig(swarm=SwarmConfig(peers=(address,)))
    swarm = cast(Any, SimpleNamespace(find_contract=lambda *_, **__: None, runs=list))
    with pytest.raises(SwarmError, match=r"0 peers of any run: .* --run RUN\.toml") as caught:
        agree_on_contract(Settings(Contract(), peer), swarm, None, kept=tmp_path if resumes else None)
    assert (f"go on alone with what is in {tmp_path} (--resume without --peers)" in str(caught.value)) == resumes


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
