"""DiLoCo in somebody's own loop: how it ends, what drives the learning rate, and what wraps optimizers there."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from opendiloco.background import in_background
from opendiloco.codec import get_codec
from opendiloco.config import Contract
from opendiloco.diloco import DiLoCo
from opendiloco.errors import SettingsError
from opendiloco.flat import unwrapped
from opendiloco.identity import peer_seed
from opendiloco.leave import Leave
from opendiloco.rounds import Position, Recovery, RoundOutcome
from opendiloco.simulated import SimulatedGroup, SimulatedSwarm

ROUNDS, H = 3, 4


def contract_of(weighting: str = "uniform") -> Contract:
    return Contract.model_validate(
        {
            "run": {"rounds": ROUNDS},
            "inner": {"steps": H},
            "outer": {"codec": "none", "weighting": weighting},
        }
    )


def alone() -> SimulatedSwarm:
    return SimulatedGroup(["a"], get_codec("none")).member("a")


def linear() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(5, 3)


def diloco(model: nn.Module, swarm: SimulatedSwarm | None = None, *, weighting: str = "uniform") -> DiLoCo:
    return DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.1), model, swarm or alone(), contract_of(weighting))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def stand_at(swarm: SimulatedSwarm, position: Position, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swarm is there, with a theta of ones; whoever catches up with it joins there."""

    def catch_up() -> Future[Recovery]:
        swarm.vectors["theta"].fill_(1.0)
        swarm.committed(position)
        return SimulatedSwarm.catch_up(swarm)

    monkeypatch.setattr(swarm, "catch_up", catch_up)


# --- the end of the loop -------------------------------------------------------------------------------


def test_block_ends_with_the_outer_parameters_after_the_last_round() -> None:
    model, steps = linear(), 0
    with diloco(model) as optimizer:
        while not optimizer.is_done:
            train(model, optimizer)
            steps += 1
            assert optimizer.global_step == steps
    assert (optimizer.round, steps, optimizer.has_left) == (ROUNDS, ROUNDS * H, False)
    assert steps == optimizer.total_steps
    assert torch.equal(flat(model), optimizer.outer.theta)


def test_loop_that_forgets_to_end_does_so_after_the_last_round_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = linear()
    with diloco(model) as optimizer:
        train(model, optimizer, 1000)
    assert optimizer.round == ROUNDS
    assert torch.equal(flat(model), optimizer.outer.theta)
    assert "while not optimizer.is_done" in caplog.text


def test_block_that_an_error_ends_lets_it_through_and_leaves_the_outer_parameters() -> None:
    model = linear()
    optimizer = diloco(model)

    def run_out_of_memory() -> None:
        with optimizer:
            train(model, optimizer, H + 1)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run_out_of_memory()
    assert torch.equal(flat(model), optimizer.outer.theta)


@pytest.mark.parametrize("waits", [False, True], ids=["between two steps", "while it waits for the swarm"])
def test_request_to_leave_ends_the_loop_with_the_outer_parameters(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, swarm = linear(), alone()
    asked: list[bool] = []
    monkeypatch.setattr(swarm, "leaving", lambda: bool(asked))
    monkeypatch.setattr("opendiloco.diloco.LEAVE_LIMIT_S", 0.05)
    with diloco(model, swarm) as optimizer:
        train(model, optimizer, H + 1)
        theta = optimizer.outer.theta.clone()
        assert not torch.equal(flat(model), theta)
        if waits:
            monkeypatch.setattr(swarm, "average", lambda request: Future[RoundOutcome]())
            train(model, optimizer, H - 2)
        asked.append(True)
        train(model, optimizer)
        assert optimizer.is_done
        assert optimizer.has_left
        assert torch.equal(flat(model), theta)
    assert (optimizer.round, torch.equal(flat(model), theta)) == (1, True)


def test_rounds_are_lines_of_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="opendiloco")
    model, swarm = linear(), alone()
    with diloco(model, swarm) as optimizer:
        train(model, optimizer, H)
        failed: Future[RoundOutcome] = Future()
        failed.set_result(RoundOutcome(verdict="retry", reason="b: sent nothing for 5 s", live=2))
        attempts = iter([lambda request: failed, swarm.average])
        monkeypatch.setattr(swarm, "average", lambda request: next(attempts)(request))
        train(model, optimizer, H)
    lines = [record for record in caplog.records if record.message.startswith("round ")]
    assert [line.levelno for line in lines] == [logging.INFO, logging.WARNING, logging.INFO]
    assert lines[0].message.startswith("round 1 | 1 of 1 workers | inner ")
    assert lines[1].message.endswith("| b: sent nothing for 5 s")
    assert "| commit " in lines[2].message


# --- what could be forgotten ---------------------------------------------------------------------------


def test_tokens_that_nobody_counts_are_an_error_at_the_first_step() -> None:
    model = linear()
    with diloco(model, weighting="tokens") as optimizer, pytest.raises(SettingsError, match="call count_tokens"):
        train(model, optimizer)


def test_optimizer_of_another_model_is_refused() -> None:
    inner = torch.optim.AdamW(linear().parameters())
    with pytest.raises(SettingsError, match="2 parameters that are not the model's"):
        DiLoCo(inner, linear(), alone(), contract_of())


def test_compiled_model_is_the_model_for_all_workers() -> None:
    model = linear()
    assert unwrapped(torch.compile(model, backend="eager")) is model
    assert unwrapped(model) is model


def test_moments_that_saw_bad_numbers_go_with_them() -> None:
    """Else every step after them would bring the bad numbers back."""
    model = linear()
    with diloco(model) as optimizer:
        train(model, optimizer, H - 1)
        model.weight.grad = torch.full_like(model.weight, math.nan)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.round == 0
        train(model, optimizer, H)
        assert optimizer.round == 1
        assert bool(torch.isfinite(optimizer.outer.theta).all())


def test_other_processes_get_the_optimizers_state_only_when_it_has_changed() -> None:
    model, replaced = linear(), list[bool]()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    with DiLoCo(inner, model, alone(), contract_of(), on_replace=replaced.append) as optimizer:
        train(model, optimizer)
        optimizer.drop_phase("bad numbers that no step was made with")
        assert replaced == [False]
        assert inner.state
        train(model, optimizer)
        with torch.no_grad():
            model.weight.fill_(math.nan)
        train(model, optimizer, H - 2)
        assert replaced == [False, True]


def test_peers_have_seeds_of_their_own() -> None:
    seeds = {peer_seed(f"peer {number}") for number in range(100)}
    assert len(seeds) == 100
    assert max(seeds) < 2**32
    assert peer_seed("peer 0") == peer_seed("peer 0")


def test_a_worker_that_starts_again_has_another_seed_once_a_round_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def seed(joined: int) -> int:
        model, swarm = linear(), alone()
        stand_at(swarm, Position(joined, "ab" * 32, "", tokens=40), monkeypatch)
        with diloco(model, swarm) as optimizer:
            seed = optimizer.seed
            train(model, optimizer, H)
            assert optimizer.seed == seed
        return seed

    assert seed(1) == seed(1) != seed(2)


# --- the learning rate ---------------------------------------------------------------------------------


def warm_up(step: int) -> float:
    return (step + 1) / 100


def lambda_lr(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, warm_up)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=ROUNDS * H + 1)


@pytest.mark.parametrize("make", [lambda_lr, one_cycle])
@pytest.mark.parametrize("joined", [0, 2], ids=["from the start", "joined at round 2"])
def test_driven_scheduler_stands_at_the_global_step(
    make: Callable[[torch.optim.Optimizer], LRScheduler], joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = torch.optim.AdamW(linear().parameters(), lr=0.1)
    expected, scheduler = [], make(reference)
    for _ in range(ROUNDS * H + 1):
        expected.append(reference.param_groups[0]["lr"])
        reference.step()
        if len(expected) <= ROUNDS * H:
            scheduler.step()
    model, swarm, rates = linear(), alone(), []
    if joined:
        stand_at(swarm, Position(joined, "ab" * 32, "", tokens=40), monkeypatch)
    with diloco(model, swarm) as optimizer:
        optimizer.drive(make(optimizer))
        while not optimizer.is_done:
            rates.append(optimizer.param_groups[0]["lr"])
            train(model, optimizer)
    rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected[joined * H :])


def test_scheduler_of_a_worker_that_is_sent_back_goes_back_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, swarm = linear(), alone()
    with diloco(model, swarm) as optimizer:
        goes, waits = lambda_lr(optimizer), one_cycle(torch.optim.AdamW(linear().parameters(), lr=0.1))
        optimizer.drive(goes)
        optimizer.drive(waits)
        train(model, optimizer, 2 * H)
        monkeypatch.setattr(
            type(optimizer), "global_step", property(lambda self: self.round * H + self.phase.schedule_step - 3)
        )
        train(model, optimizer, 2)
        assert (goes.last_epoch, waits.last_epoch) == (2 * H - 1, 2 * H)


# --- what else wraps optimizers ------------------------------------------------------------------------


def test_gradient_scaler_unscales_clips_and_skips_steps_that_overflow() -> None:
    model, twin = linear(), linear()
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with diloco(model) as optimizer:
        for overflows in (False, True, False):
            scaler.scale(model(torch.ones(2, 5)).square().sum()).backward()
            assert model.weight.grad is not None
            if overflows:
                model.weight.grad[0, 0] = math.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.phase.steps == 2
        assert scaler.get_scale() == 512.0
        for _ in range(2):
            twin(torch.ones(2, 5)).square().sum().backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            plain.step()
            plain.zero_grad()
        torch.testing.assert_close(flat(model), flat(twin))


@pytest.fixture
def accelerated() -> Iterator[None]:
    """accelerate keeps its state in classes."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not PartialState._shared_state


@pytest.mark.usefixtures("accelerated")
def test_accelerate_accumulates_and_counts_a_step_when_there_is_one() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, twin = linear(), linear()
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    with diloco(model) as diloco_:
        wrapped, optimizer = accelerator.prepare(model, diloco_)
        for _ in range(2 * (H - 1)):
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(torch.ones(2, 5)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
        assert diloco_.phase.steps == H - 1
        train(twin, plain, H - 1)
        torch.testing.assert_close(flat(model), flat(twin))
        for _ in range(2):
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(torch.ones(2, 5)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
        assert (diloco_.round, torch.equal(flat(model), diloco_.outer.theta)) == (1, True)


@pytest.mark.usefixtures("accelerated")
def test_accelerates_scaler_does_not_go_round_diloco() -> None:
    Accelerator(cpu=True)
    model = linear()
    with diloco(model) as diloco_:
        optimizer = AcceleratedOptimizer(diloco_, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
        for value, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
            optimizer.scaler.scale(model(torch.ones(2, 5)).sum()).backward()
            assert model.weight.grad is not None
            model.weight.grad.mul_(value)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped is skipped
        assert diloco_.phase.steps == 2
        assert diloco_.param_groups is diloco_.inner.param_groups


# --- parts ---------------------------------------------------------------------------------------------


def test_call_in_the_background_gives_its_result_or_its_error() -> None:
    def fail() -> None:
        raise Leave("no")

    assert in_background(lambda: 7, "seven").result(20) == 7
    with pytest.raises(Leave, match="no"):
        in_background(fail, "fails").result(20)


def test_round_report_is_the_attempt_with_what_came_of_it() -> None:
    model, reports = linear(), []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(inner, model, alone(), contract_of(), on_round=reports.append) as optimizer:
        train(model, optimizer, H)
    (report,) = reports
    assert (report.round, report.inner_steps, report.lineage) == (1, H, optimizer.outer.lineage)
    assert report.params_hash.result() == optimizer.params_hash
    assert replace(report, outer_gradient_norm=None) != report
