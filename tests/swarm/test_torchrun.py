"""A worker of several processes (torchrun): the same training as in one process, one member of the swarm, one end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.commands import Command, SmallContract
from support.waiting import LIMIT_S, WaitUntil

from opendiloco.config import ComputeConfig, Contract, OuterConfig, RunConfig
from opendiloco.metrics import read_metrics
from opendiloco.settings import write_toml
from opendiloco.simulate import simulate

ROUNDS = 2
EVERY = ("--set", "checkpoint.every_rounds=1")


class RankedCommand(Command):
    """`opendiloco train` under torchrun, as two processes or more."""

    def __init__(self, folder: Path, contract: Contract, *more: str, processes: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        write_toml(folder / "contract.toml", contract)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        train = ["-m", "--", "opendiloco", "train", "--run", str(folder / "contract.toml"), "--out", str(folder)]
        sets = ["--set", "log.every_steps=1", "--set", "compute.micro_batch_size=1", *more]
        with (folder / "stderr.txt").open("wb") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, *torchrun, *train, *sets],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )

    def rank(self, index: int) -> psutil.Process:
        """One of its processes."""
        (found,) = (p for p in psutil.Process(self.popen.pid).children() if p.environ().get("RANK") == str(index))
        return found

    def close(self) -> None:
        """Kill torchrun, which ends what is below it."""
        if self.popen.poll() is None:
            below = self.below()
            self.popen.kill()
            psutil.wait_procs(below, timeout=LIMIT_S)
        self.popen.wait()


@pytest.fixture
def contract(make_contract: SmallContract) -> Contract:
    small = make_contract()
    return small.model_copy(
        update={
            "run": RunConfig(id="ranks", rounds=1000),
            "outer": OuterConfig(codec="none"),
            "inner": small.inner.model_copy(update={"batch_size": 4}),
        }
    )


def _await_rounds(command: RankedCommand, wait_until: WaitUntil, rounds: int = ROUNDS) -> list[psutil.Process]:
    """All its processes, once it has committed more than so many rounds."""
    wait_until(lambda: len(command.events("round")) > rounds or command.popen.poll() is not None, "it commits rounds")
    assert command.popen.poll() is None, command.errors
    return [psutil.Process(command.popen.pid), *command.below()]


def _assert_gone(command: RankedCommand, processes: list[psutil.Process], limit_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    assert not alive, command.errors


def test_every_process_leaves_when_torchrun_is_killed(
    contract: Contract, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with contextlib.closing(RankedCommand(tmp_path / "ranked", contract)) as command:
        processes = _await_rounds(command, wait_until)
        command.popen.kill()
        _assert_gone(command, processes, LIMIT_S)
    assert "torchrun has ended: process 0 of this worker leaves" in command.errors
    assert "torchrun has ended: process 1 of this worker leaves" in command.errors
    assert [event["reason"] for event in command.events("leave")] == ["asked to leave"]


def test_a_worker_leaves_within_10_s_while_one_of_its_processes_is_frozen(
    contract: Contract, tmp_path: Path, wait_until: WaitUntil
) -> None:
    divided = contract.model_copy(update={"inner": contract.inner.model_copy(update={"batch_size": 3})})
    with contextlib.closing(RankedCommand(tmp_path / "ranked", divided, processes=3)) as command:
        processes = _await_rounds(command, wait_until)
        command.rank(1).suspend()
        command.popen.terminate()
        _assert_gone(command, processes[1:], 10)
        command.wait()
    assert "this worker's other 2 processes do not answer within" in command.errors
    assert "killed process 1 of this worker, which did not answer" in command.errors
    assert "killed process 2" not in command.errors
    assert [event["reason"] for event in command.events("leave")] == ["asked to leave"]


def test_a_worker_left_by_torchrun_in_order_goes_on_from_its_checkpoint_as_one_process_would(
    contract: Contract, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with contextlib.closing(RankedCommand(tmp_path / "ranked", contract, *EVERY)) as command:
        processes = _await_rounds(command, wait_until)
        command.popen.terminate()
        _assert_gone(command, processes[1:], 10)
        assert command.wait() == 1  # torchrun's own
    assert [event["reason"] for event in command.events("leave")] == ["asked to leave"]
    left = len(command.events("round"))
    with contextlib.closing(RankedCommand(tmp_path / "ranked", contract, *EVERY, "--resume", "latest")) as resumed:
        _await_rounds(resumed, wait_until, left + 1)
    assert [event["source"] for event in resumed.events("join")] == ["fresh", "checkpoint"]

    simulate(
        contract.model_copy(update={"run": RunConfig(id="ranks", rounds=left + 1)}),
        ComputeConfig(threads=1),
        ["alone"],
        tmp_path / "alone",
    )
    alone = [e for e in read_metrics(tmp_path / "alone" / "alone" / "metrics.jsonl") if e["event"] == "inner_step"]
    by_step = {event["global_inner_step"]: event for event in resumed.events("inner_step")}
    for event in alone:
        assert by_step[event["global_inner_step"]]["loss"] == pytest.approx(event["loss"], rel=1e-3)
        assert by_step[event["global_inner_step"]]["tokens_seen"] == event["tokens_seen"]


def test_two_processes_train_like_one_and_end_together_when_one_is_killed(
    contract: Contract, tmp_path: Path, wait_until: WaitUntil
) -> None:
    command = RankedCommand(tmp_path / "ranked", contract)
    try:
        wait_until(
            lambda: len(command.events("round")) > ROUNDS or command.popen.poll() is not None, "it commits some rounds"
        )
        processes = command.below()
        command.rank(1).kill()
        assert command.wait() != 0
    finally:
        for process in [psutil.Process(command.popen.pid), *command.below()] if command.popen.poll() is None else []:
            process.kill()
        command.popen.wait()
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert not alive
    lost = "another of this worker's 2 processes has ended ("
    has_left = bool(command.events("leave"))  # torchrun may have asked it to, before
    assert lost in command.errors or has_left, command.errors

    short = contract.model_copy(update={"run": RunConfig(id="ranks", rounds=ROUNDS)})
    simulate(short, ComputeConfig(threads=1), ["alone"], tmp_path / "alone")
    alone = read_metrics(tmp_path / "alone" / "alone" / "metrics.jsonl")
    for kind, field in (("inner_step", "loss"), ("inner_step", "grad_norm"), ("eval", "loss"), ("round", "tokens")):
        expected = [event[field] for event in alone if event["event"] == kind]
        assert [event[field] for event in command.events(kind)][: len(expected)] == pytest.approx(expected, rel=1e-3)
