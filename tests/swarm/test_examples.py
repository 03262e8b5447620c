"""The examples run as they are, and do what they and the README say."""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from opendiloco import Contract, DiLoCo, InnerConfig, RunConfig, Swarm, SwarmConfig
from opendiloco.leave import Leave

if TYPE_CHECKING:
    from support.waiting import WaitUntil
    from support.warm import Forked, Warm

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT_S = 170.0
LINES = 40


def start(warm: Warm, example: str, folder: Path, workers: int, *peers: str) -> Forked:
    folder.mkdir()
    shown, arguments = folder / "shown.txt", [str(ROOT / "examples" / example), str(folder), str(workers), *peers]
    return warm.start(arguments, out=shown, errors=shown, imports=["opendiloco.callback", "transformers.trainer"])


def model_of(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_two_trainers_form_a_swarm_and_end_with_one_model(tmp_path: Path, warm: Warm, wait_until: WaitUntil) -> None:
    one = start(warm, "trainer.py", tmp_path / "one", 2)
    addresses = tmp_path / "one" / "addresses"
    wait_until(lambda: one.poll() is not None or addresses.exists(), "the first one is up")
    two = start(warm, "trainer.py", tmp_path / "two", 2, *addresses.read_text().split())
    codes = [process.wait(LIMIT_S) for process in (one, two)]
    outputs = [(tmp_path / name / "shown.txt").read_text() for name in ("one", "two")]
    assert codes == [0, 0], outputs
    assert model_of(tmp_path / "one") == model_of(tmp_path / "two")
    assert all(output.count("'round_workers': 2") == 4 for output in outputs), outputs
    assert ["started a swarm, " in outputs[0], "joined a swarm, " in outputs[1]] == [True, True], outputs


@pytest.mark.parametrize("example", ["own_loop.py", "accelerate_loop.py"])
def test_loop_alone_does_its_rounds_and_saves_a_model(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In this process, where what it imports is there already."""
    monkeypatch.setattr(sys, "argv", [example, str(tmp_path), "1"])
    caplog.set_level(logging.INFO)
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert len(model_of(tmp_path)) > 100_000
    assert re.findall(r"round (\d) \| 1 of 1 workers \|.*\| commit", caplog.text) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("arguments", [("runs/one",), ("runs/one", "two")])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example.stem))
def test_example_with_a_missing_or_wrong_argument_says_how_it_is_used(
    example: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(example), run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr() == ("", f"usage: {example.name} FOLDER WORKERS [ADDRESS ...]\n")


def test_ctrl_c_ends_a_loop_in_order(tmp_path: Path) -> None:
    contract = Contract(run=RunConfig(rounds=10_000), inner=InnerConfig(steps=3))
    model = torch.nn.Linear(2, 2)

    def train() -> None:
        with Swarm.join(SwarmConfig(), tmp_path) as swarm:
            with DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), model, swarm, contract) as optimizer:
                while not optimizer.is_done:
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                    if (optimizer.round, optimizer.phase.steps) == (2, 1):
                        os.kill(os.getpid(), signal.SIGINT)
            assert (optimizer.round, optimizer.phase.steps, optimizer.has_left) == (2, 2, True)
            assert torch.equal(model.weight.detach().reshape(-1), optimizer.outer.theta[:4])
            assert (tmp_path / "addresses").read_text().split() == swarm.addresses
            raise Leave  # as whatever waits for the swarm does now

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 0
    assert not (tmp_path / "addresses").exists()  # or others would try them
    assert signal.getsignal(signal.SIGINT) is before


def test_examples_are_short() -> None:
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) <= LINES, example.name


def test_readme_shows_lines_of_the_examples() -> None:
    section = (ROOT / "README.md").read_text().split("## Your own training script\n")[1].split("\n## ")[0]
    blocks = re.findall(r"\(examples/(\w+\.py)\).*?```python\n(.*?)```", section, re.DOTALL)
    assert sorted(name for name, _ in blocks) == [example.name for example in EXAMPLES]
    for name, block in blocks:
        lines = {line.strip() for line in (ROOT / "examples" / name).read_text().splitlines()}
        shown = {line.strip() for line in block.splitlines()} - {"..."}
        assert shown <= lines, f"{name}: {shown - lines}"
