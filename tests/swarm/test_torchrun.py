"""A worker of several processes (torchrun): the same training as in one process, one member of the swarm, one end."""

from __future__ import annotations

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


class RankedCommand(Command):
    """`opendiloco train` under torchrun, as two processes."""

    def __init__(self, folder: Path, contract: Contract) -> None:
        folder.mkdir()
        self.folder = folder
        write_toml(folder / "contract.toml", contract)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        train = ["-m", "--", "opendiloco", "train", "--run", str(folder / "contract.toml"), "--out", str(folder)]
        sets = ["--set", "log.every_steps=1", "--set", "compute.micro_batch_size=1"]
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
        """One of its two processes."""
        (found,) = (p for p in psutil.Process(self.popen.pid).children() if p.environ().get("RANK") == str(index))
        return found


def test_two_processes_train_like_one_and_end_together_when_one_is_killed(
    make_contract: SmallContract, tmp_path: Path, wait_until: WaitUntil
) -> None:
    small = make_contract()
    contract = small.model_copy(
        update={
            "run": RunConfig(id="ranks", rounds=1000),
            "outer": OuterConfig(codec="none"),
            "inner": small.inner.model_copy(update={"batch_size": 4}),
        }
    )
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
    lost = "opendiloco: another of this worker's 2 processes has ended ("
    assert lost in command.errors or command.events("leave"), (
        command.errors
    )  # torchrun may have asked it to leave first

    short = contract.model_copy(update={"run": RunConfig(id="ranks", rounds=ROUNDS)})
    simulate(short, ComputeConfig(threads=1), ["alone"], tmp_path / "alone")
    alone = read_metrics(tmp_path / "alone" / "alone" / "metrics.jsonl")
    for kind, field in (("inner_step", "loss"), ("inner_step", "grad_norm"), ("eval", "loss"), ("round", "tokens")):
        expected = [event[field] for event in alone if event["event"] == kind]
        assert [event[field] for event in command.events(kind)][: len(expected)] == pytest.approx(expected, rel=1e-3)
