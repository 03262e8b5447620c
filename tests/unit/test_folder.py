"""A worker's folder: what is in the way is named, and what an earlier life has left there is not lost by a start."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from opendiloco.card import RECORD
from opendiloco.config import Contract, RunConfig
from opendiloco.errors import SettingsError
from opendiloco.folder import EarlierLife, check_folder, check_owner
from opendiloco.leave import Leave
from opendiloco.settings import write_toml


@pytest.mark.parametrize("name", ["checkpoints", "model", "roundlog"])
def test_a_file_in_the_place_of_a_folder_is_named_before_training(tmp_path: Path, name: str) -> None:
    check_folder(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(SettingsError, match=f"holds a file named {name}: move it"):
        check_folder(tmp_path)


@pytest.mark.parametrize("name", ["run.toml", "peer.toml", "metrics.jsonl", "log.txt"])
def test_a_folder_in_the_place_of_a_file_is_named_before_training(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(SettingsError, match=f"holds a folder named {name}: move it"):
        check_folder(tmp_path)


def test_a_folder_with_the_work_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    mine, other = Contract(), Contract(run=RunConfig(id="other"))
    check_owner(tmp_path, mine)
    write_toml(tmp_path / "run.toml", other)
    check_owner(tmp_path, mine)  # nothing came of that start
    (tmp_path / "roundlog").mkdir()
    (tmp_path / "roundlog" / "round-3").write_text("")
    check_owner(tmp_path, other)
    line = r'of run other with another contract: run\.id is "other" there and "demo" now: name another folder, or go on'
    with pytest.raises(SettingsError, match=line):
        check_owner(tmp_path, mine)


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
        (
            "latest",
            ("roundlog/round-3",),
            "--resume latest finds a checkpoint where checkpoint.every_rounds is above 0",
        ),
        ("latest", (), ""),
    ],
)
def test_a_run_that_begins_anew_in_a_used_folder_says_so(
    resume: str | None, kept: tuple[str, ...], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    EarlierLife(tmp_path).begin_anew(Contract(), resume)
    assert len(caplog.messages) == bool(line)
    assert re.search(line, " ".join(caplog.messages))


def test_a_service_that_always_resumes_begins_at_its_first_start_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    EarlierLife(tmp_path).begin_anew(Contract(), "latest")
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == f"--resume latest: {tmp_path} holds no checkpoint yet, this worker starts at round 0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that holds the model after round 7 of 10 of the run below, and nothing to go on from."""
    (tmp_path / "model").mkdir()
    record = {"contract": RUN.digest, "round": 7, "lineage": "a" * 64, "params_hash": "b" * 64, "tokens": 70}
    (tmp_path / "model" / RECORD).write_text(json.dumps(record))
    return tmp_path


RUN = Contract(run=RunConfig(id="mine", rounds=10))


def test_resuming_replaces_no_model_that_training_has_come_to(model: Path) -> None:
    line = (
        r"--resume latest: .* holds no checkpoint, and starting at round 0 would replace the model of round 7 in .*: "
    )
    with pytest.raises(SettingsError, match=line + "--peers ADDRESS goes back"):
        EarlierLife(model).begin_anew(RUN, "latest")


def test_resuming_a_run_that_is_over_leaves_at_once_and_says_where_its_model_is(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    record = json.loads((model / "model" / RECORD).read_text())
    (model / "model" / RECORD).write_text(json.dumps(record | {"round": 10}))
    with pytest.raises(Leave):
        EarlierLife(model).begin_anew(RUN, "latest")
    (message,) = caplog.messages
    assert message.startswith(f"run mine is over: the model after its 10 rounds is in {model / 'model'}")


@pytest.mark.parametrize(("contract", "resume"), [(RUN, None), (Contract(run=RunConfig(id="next")), "latest")])
def test_a_model_may_be_replaced_by_who_asks_for_it_and_by_another_run(
    model: Path, contract: Contract, resume: str | None
) -> None:
    EarlierLife(model).begin_anew(contract, resume)


def test_a_new_beginning_is_told_once_and_by_what_was_there_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints" / "round-000012").mkdir(parents=True)
    life = EarlierLife(tmp_path)
    (tmp_path / "checkpoints" / "round-000001").mkdir()
    for _ in range(2):
        life.begin_anew(RUN, None)
    assert re.search("newest checkpoint: round-000012", " ".join(caplog.messages))
    assert len(caplog.messages) == 1
