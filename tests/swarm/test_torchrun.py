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


def _assert_like_one_process(command: RankedCommand, contract: Contract, folder: Path, rounds: int) -> None:
    """Its first rounds are those of a worker that is one process and is never interrupted."""
    short = contract.model_copy(update={"run": RunConfig(id="ranks", rounds=rounds)})
    simulate(short, ComputeConfig(threads=1), ["alone"], folder)
    alone = read_metrics(folder / "alone" / "metrics.jsonl")
    for kind, place, fields in (
        ("inner_step", "global_inner_step", ("loss", "grad_norm", "tokens_seen")),
        ("round", "round", ("tokens",)),
        ("eval", "round", ("loss",)),
    ):
        last = {event[place]: event for event in command.events(kind)}  # of a step done twice the one that counts
        for expected in (event for event in alone if event["event"] == kind):
            assert [last[expected[place]][field] for field in fields] == pytest.approx(
                [expected[field] for field in fields], rel=1e-3
            )


def test_two_processes_train_like_one_end_together_and_go_on_from_their_checkpoint(
    contract: Contract, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """In their first life one of them is killed, in the second torchrun."""
    with contextlib.closing(RankedCommand(tmp_path / "ranked", contract, *EVERY)) as command:
        processes = _await_rounds(command, wait_until)
        command.rank(1).kill()
        assert command.wait() != 0
        _assert_gone(command, processes[1:], LIMIT_S)
    has_left = bool(command.events("leave"))  # torchrun may have asked it to, before
    assert "another of this worker's 2 processes has ended (" in command.errors or has_left, command.errors
    committed = len(command.events("round"))

    with contextlib.closing(RankedCommand(tmp_path / "ranked", contract, *EVERY, "--resume", "latest")) as resumed:
        processes = _await_rounds(resumed, wait_until, committed + 1)
        resumed.popen.kill()
        _assert_gone(resumed, processes, LIMIT_S)
    for index in range(2):
        assert f"torchrun has ended: process {index} of this worker leaves" in resumed.errors
    assert [event["source"] for event in resumed.events("join")] == ["fresh", "checkpoint"]
    assert resumed.events("leave")[-1]["reason"] == "asked to leave"
    _assert_like_one_process(resumed, contract, tmp_path / "alone", committed + 1)


def test_a_worker_asked_to_leave_by_torchrun_leaves_in_order(
    contract: Contract, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with contextlib.closing(RankedCommand(tmp_path / "ranked", contract, *EVERY)) as command:
        processes = _await_rounds(command, wait_until)
        command.popen.terminate()
        _assert_gone(command, processes[1:], 10)
        assert command.wait() == 1  # torchrun's own
    assert [event["reason"] for event in command.events("leave")] == ["asked to leave"]
    assert (command.folder / "model" / "model.safetensors").is_file()


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
