"""The comparison of training systems: what its figures mean, and that all systems get the same to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks import steps
from benchmarks.bench_train import SYSTEMS, chosen, holds
from benchmarks.llama import HEAD, Llama, rotate
from benchmarks.network_tables import train_table
from benchmarks.steps import Lap, Pace, Plan, Text
from benchmarks.team import Round, seconds_to, summary, utilization
from benchmarks.trainers import TRAINERS
from opendiloco.shared import create_shared_memory

LOSSES, SECONDS = [5.0, 3.0, 2.0, 1.0], [10.0, 20.0, 40.0]


@pytest.fixture
def plan() -> Iterator[Plan]:
    memory = create_shared_memory()
    os.write(memory, bytes(byte for sequence in range(50) for byte in (sequence, 0, 0, 0)))
    yield Plan(
        workers=3,
        rounds=2,
        steps=5,
        batch=4,
        seq_len=4,
        held_out=10,
        hidden=32,
        layers=1,
        lr=1e-3,
        step_s=0.5,
        memory=memory,
    )
    os.close(memory)


def a_round(
    *inner_s: float, seconds: float, carried_bytes: int = 0, problem: str = "", identical: bool = True
) -> Round:
    laps = [Lap(seconds, each, each / 2, batches=5, problem=problem) for each in inner_s]
    return Round(seconds, laps, [carried_bytes] * len(laps), identical)


@pytest.mark.parametrize(
    ("target", "reached_s"),
    [(5.5, 0.0), (4.0, 5.0), (3.0, 10.0), (2.25, 25.0), (1.0, 70.0), (0.9, None)],
)
def test_a_loss_is_reached_on_the_line_between_two_rounds_or_never(target: float, reached_s: float | None) -> None:
    assert seconds_to(target, LOSSES, SECONDS) == (None if reached_s is None else pytest.approx(reached_s))


def test_a_loss_counts_as_reached_the_first_time_even_if_it_rises_again() -> None:
    assert seconds_to(2.0, [3.0, 1.0, 4.0, 1.0], [1.0, 1.0, 1.0]) == pytest.approx(0.5)


def test_utilization_is_the_share_of_all_workers_time_in_steps() -> None:
    rounds = [a_round(8.0, 6.0, seconds=10.0), a_round(10.0, 10.0, seconds=30.0)]
    assert utilization(rounds) == pytest.approx(34 / 80)


def test_a_round_costs_what_the_worker_that_computed_longest_waits() -> None:
    assert a_round(8.0, 6.0, seconds=10.0).exchange_s == pytest.approx(2.0)


def test_a_byte_that_one_link_sends_and_another_receives_counts_once(plan: Plan) -> None:
    rounds = [a_round(1.0, 1.0, seconds=2.0, carried_bytes=800)] * 2
    found = summary(plan, rounds, [3.0, 2.0, 1.0], target=2.5)
    tokens = 2 * 2 * 5 * 16
    assert found["tokens"] == tokens
    assert found["bytes_per_token"] == pytest.approx(2 * 800 / tokens)
    assert found["tokens_per_s"] == pytest.approx(tokens / 4)
    assert found["loss_reached_s"] == pytest.approx(1.0)


def test_a_round_without_all_workers_is_said_and_counted(plan: Plan) -> None:
    rounds = [a_round(1.0, seconds=2.0), a_round(1.0, seconds=2.0, problem="3 of 4", identical=False)]
    found = summary(plan, rounds, [3.0, 2.0, 1.0], target=2.5)
    assert (found["problems"], found["identical_rounds"]) == (["round 2: 3 of 4"], 1)


def test_the_table_says_which_system_failed_and_which_did_not_run(plan: Plan) -> None:
    asked = {"system": "gloo DDP", "codec": "fp32", "mbit": 20.0, "wire_limit_s": 9.0}
    failed = {**asked, "failed": "ended", **summary(plan, [a_round(1.0, seconds=2.0)], [3.0, 2.0], target=1.0)}
    absent = {**asked, "failed": "no answer", **summary(plan, [], [], target=1.0)}
    _, _, *rows = train_table({"train": [failed, absent]}, "train").splitlines()
    assert rows[0].startswith(
        "| gloo DDP fp32, 20 Mbit/s, then it failed | 40 | 50% | 0 | 1.00 | 1.00 | 9.00 | 2.000 |"
    )
    assert rows[0].endswith("| not reached | 1 of 1 |")
    assert rows[1].startswith("| gloo DDP fp32, 20 Mbit/s | did not run | - |")


@pytest.mark.parametrize(
    ("change", "is_fine"),
    [
        ({}, True),
        ({"round_s": 0.51}, False),
        ({"round_s": 0.51, "codec": "fp16"}, True),
        ({"identical_rounds": 4}, False),
        ({"problems": ["round 2"]}, False),
        ({"failed": "ended"}, False),
        ({"failed": "ended", "system": "gloo DDP"}, True),
    ],
)
def test_bars_are_for_int8_and_replicas_of_every_round_for_both_codecs(
    change: dict[str, object], is_fine: bool
) -> None:
    good = {"system": "opendiloco", "codec": "int8", "mbit": 100.0, "round_s": 0.5, "failed": "", "problems": []}
    assert holds({**good, "identical_rounds": 5, "rounds_asked": 5, **change}, with_bars=True) == is_fine


def test_a_system_that_is_not_installed_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    assert [system.name for system in chosen(["gloo-ddp", "torchft-diloco"])] == ["gloo DDP"]
    assert capsys.readouterr().err == (
        "torchft-diloco: left out (import of torchft halted; None in sys.modules): "
        ".venv/bin/pip install -e '.[torchft]'\n"
    )


def test_every_system_has_a_trainer() -> None:
    assert {system.name for system in SYSTEMS.values()} == set(TRAINERS)


def test_workers_share_no_sequence_and_none_is_held_out(plan: Plan) -> None:
    texts = [Text(plan, index) for index in range(plan.workers)]
    read = [[int(tokens[0]) for _ in range(3) for tokens in text.next()] for text in texts]
    held_out = [int(tokens[0]) for tokens in texts[0].held_out]
    together = [sequence for of_worker in (*read, held_out) for sequence in of_worker]
    assert len(together) == len(set(together)) == 3 * 3 * plan.batch + plan.held_out


def test_every_system_reads_the_same_batches(plan: Plan) -> None:
    one, other = Text(plan, 1), Text(plan, 1)
    assert all(torch.equal(one.next(), other.next()) for _ in range(20))  # also after the last sequence


class Clock:
    """Stands for the module time: nothing passes but what is slept."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(steps, "time", clock)
    return clock


@pytest.mark.parametrize(("compute_s", "step_s"), [(0.2, 0.5), (0.7, 0.7)])
def test_a_step_is_filled_up_to_its_length_and_no_further(clock: Clock, compute_s: float, step_s: float) -> None:
    pace = Pace(0.5)
    parameter = torch.nn.Parameter(torch.zeros(2))
    adamw = pace.adamw([parameter], 1e-3)
    pace.begin()
    clock.sleep(compute_s)
    pace.rest()
    clock.sleep(9.0)  # what a synchronous system waits for the others here is none of its steps
    parameter.grad = torch.ones(2)
    adamw.step()
    assert (pace.inner_s, pace.compute_s) == (pytest.approx(step_s), pytest.approx(compute_s))


def test_a_step_leaves_room_for_the_update_after_it(clock: Clock) -> None:
    pace, parameter = Pace(0.5), torch.nn.Parameter(torch.zeros(2))
    adamw = pace.adamw([parameter], 1e-3)
    adamw.register_step_pre_hook(lambda *_: clock.sleep(0.1))
    parameter.grad = torch.ones(2)
    for _ in range(2):
        pace.begin()
        pace.rest()
        adamw.step()
    assert pace.inner_s == pytest.approx(0.6 + 0.5)  # the first one cannot know yet


def test_the_model_does_not_see_what_it_predicts() -> None:
    model, seen = Llama(hidden=64, layers=2, seq_len=8), list[torch.Tensor]()
    model.norm.register_forward_hook(lambda _, __, hidden: seen.append(hidden.detach()))
    tokens = torch.arange(16).view(2, 8)
    changed = tokens.clone()
    changed[:, 5] = 99
    model(tokens), model(changed)
    before, after = seen
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_attention_sees_distances_between_tokens_not_their_places() -> None:
    turns = Llama(hidden=HEAD, layers=1, seq_len=8).turns
    query, key = torch.randn(1, 1, 1, HEAD), torch.randn(1, 1, 1, HEAD)
    places = [turns[:, at : at + 1] for at in range(8)]
    scores = [float((rotate(query, places[at + 3]) * rotate(key, places[at])).sum()) for at in range(4)]
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-4)


def test_all_workers_begin_with_the_same_parameters() -> None:
    one, other = (list(Llama(hidden=32, layers=1, seq_len=4).parameters()) for _ in range(2))
    assert all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))
