"""DiLoCo as an optimizer in one's own loop: what it moves and what it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.scripted import Swarm, contract_of, diloco, flat, linear, train
from torch import Tensor, nn

from opendiloco.outer import genesis_lineage, next_lineage, params_hash
from opendiloco.report import RoundReport
from opendiloco.rounds import Position

# --- the outer step in one's own loop ------------------------------------------------------------------


def test_every_hth_step_is_an_outer_step_of_nesterov_momentum() -> None:
    model, twin = linear(), linear()
    theta = [parameter.detach().clone() for parameter in twin.parameters()]
    outer = torch.optim.SGD(theta, lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.SGD(twin.parameters(), lr=0.1)
    with diloco(model, contract_of(steps=3)) as optimizer:
        for round in range(1, 4):
            train(model, optimizer, 3, seed=round)
            train(twin, inner, 3, seed=round)
            for anchor, parameter in zip(theta, twin.parameters(), strict=True):
                anchor.grad = anchor - parameter.detach()
            outer.step()
            for anchor, parameter in zip(theta, twin.parameters(), strict=True):
                parameter.data.copy_(anchor)
            assert (optimizer.round, optimizer.phase.steps) == (round, 0)
            torch.testing.assert_close(flat(list(model.parameters())), flat(theta), rtol=1e-5, atol=1e-6)
            assert torch.equal(flat(list(model.parameters())), optimizer.outer.theta)


def test_between_rounds_only_the_inner_optimizer_moves_the_model() -> None:
    model, twin = linear(), linear()
    with diloco(model, contract_of(steps=4)) as optimizer:
        theta = optimizer.outer.theta.clone()
        train(model, optimizer, 3)
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 3)
        assert torch.equal(flat(list(model.parameters())), flat(list(twin.parameters())))
        assert torch.equal(optimizer.outer.theta, theta)
        assert (optimizer.round, optimizer.phase.steps) == (0, 3)
        optimizer.write_outer_parameters()
        assert torch.equal(flat(list(model.parameters())), theta)


def test_the_inner_optimizers_moments_live_on_over_rounds() -> None:
    model = linear()
    with diloco(model, contract_of(steps=2), inner=torch.optim.AdamW(model.parameters())) as optimizer:
        train(model, optimizer, 6)
        assert [state["step"].item() for state in optimizer.state.values()] == [6.0, 6.0]


def test_the_swarm_is_told_how_far_the_phase_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.phase.REPORT_S", 0.0)
    model, swarm = linear(), Swarm()
    with diloco(model, contract_of(steps=4), swarm) as optimizer:
        train(model, optimizer, 6)
    assert [report.steps for report in swarm.reports] == [1, 2, 3, 1, 2]


def test_the_inner_step_may_take_a_closure() -> None:
    model = linear()
    with diloco(model) as optimizer:
        assert optimizer.step(lambda: 1.25) == 1.25
        assert optimizer.step() is None


def test_a_round_announces_its_lineage_and_the_hash_of_its_state() -> None:
    model, swarm = linear(), Swarm()
    contract = contract_of(steps=1)
    reports: list[RoundReport] = []
    with diloco(model, contract, swarm, on_round=reports.append) as optimizer:
        first = optimizer.params_hash
        assert swarm.entered == [Position(0, genesis_lineage(contract.digest, first), first)]
        train(model, optimizer, 2)
        digests = [report.outcome.digest for report in reports]
        lineage = swarm.entered[0].lineage
        for round, digest in enumerate(digests, start=1):
            lineage = next_lineage(
                lineage, round=round, weights={"a": 1.0}, tokens={"a": 1}, readings={"a": ()}, average_digest=digest
            )
            assert swarm.positions[round - 1] == Position(round, lineage, "", round)
            assert reports[round - 1].lineage == lineage
        assert optimizer.params_hash == params_hash(optimizer.outer)
    hashes = [report.params_hash.result() for report in reports if report.params_hash is not None]
    assert swarm.hashes == dict(enumerate(hashes, start=1))
    assert len({first, *swarm.hashes.values()}) == 3


# --- what it leaves alone ------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Trained, frozen and tied parameters, and buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = linear(), nn.BatchNorm1d(3), nn.Linear(5, 3, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("positions", torch.arange(7))

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(batch)) + self.second(batch)
        return out


def test_frozen_parameters_and_buffers_stay_as_they_are() -> None:
    model = Mixed()
    with diloco(model, contract_of(steps=2)) as optimizer:
        bias = model.first.bias.clone()
        train(model, optimizer, 3)
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(3))).sum().backward()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
        assert optimizer.round == 2
        assert torch.equal(model.first.bias, bias)
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        assert {"norm.running_mean", "norm.num_batches_tracked", "positions"} <= buffers.keys()


def test_tied_parameters_count_once_and_stay_tied() -> None:
    model, swarm = Mixed(), Swarm()
    with diloco(model, contract_of(steps=1), swarm) as optimizer:
        assert swarm.vectors["theta"].numel() == 15 + 3 + 3  # weight, norm's gain and bias; first.bias is frozen
        train(model, optimizer, 2)
        assert model.second.weight is model.first.weight
        assert torch.equal(model.first.weight.detach().reshape(-1), optimizer.outer.theta[:15])


def test_bf16_parameters_keep_their_dtype_while_theta_keeps_fp32() -> None:
    model = linear(dtype=torch.bfloat16)
    with diloco(model, contract_of(steps=2)) as optimizer:
        train(model, optimizer, 4)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        theta = optimizer.outer.theta
        assert not torch.equal(theta, theta.bfloat16().float())
        assert torch.equal(flat(list(model.parameters())), theta.bfloat16().float())


def test_a_bf16_replica_that_does_not_move_has_no_pseudo_gradient() -> None:
    model, swarm = linear(dtype=torch.bfloat16), Swarm()
    with diloco(model, contract_of(steps=1), swarm) as optimizer:
        train(model, optimizer, 1)
        optimizer.zero_grad()
        optimizer.step()
        assert swarm.gradients[0].any()
        assert not swarm.gradients[1].any()


def test_outer_adam_has_a_second_moment_and_the_others_do_not() -> None:
    for name in ("nesterov", "adam"):
        swarm = Swarm()
        with diloco(linear(), contract_of(optimizer=name), swarm):
            assert swarm.vectors["second_moment"].numel() == (18 if name == "adam" else 0)


# --- torch's habits ------------------------------------------------------------------------------------


def test_a_learning_rate_scheduler_works_on_it() -> None:
    model = linear()
    with diloco(model, contract_of(steps=100)) as optimizer:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for lr in (0.1, 0.05, 0.025):
            before = model.weight.detach().clone()
            train(model, optimizer, 1)
            assert model.weight.grad is not None
            torch.testing.assert_close(model.weight.detach(), before - lr * model.weight.grad)
            scheduler.step()
        assert optimizer.inner.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.0125


def test_torchs_gradient_scaler_works_on_it_and_an_overflow_is_no_step() -> None:
    model, twin = linear(), linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with diloco(model, contract_of(steps=2)) as optimizer:
        while optimizer.round < 1:
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 5)).square().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 2.0**127
        assert optimizer.phase.steps == 0
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        with diloco(twin, contract_of(steps=2), inner=plain) as other:
            for _ in range(2):
                other.zero_grad()
                twin(torch.ones(4, 5)).square().sum().backward()
                other.step()
        torch.testing.assert_close(flat(list(model.parameters())), flat(list(twin.parameters())))


def test_clipping_and_zero_grad_see_the_inner_optimizers_groups() -> None:
    model = linear()
    groups: list[dict[str, Any]] = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias]}]
    with diloco(model, inner=torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)) as optimizer:
        assert optimizer.param_groups is optimizer.inner.param_groups
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        model(torch.ones(1, 5)).sum().backward()
        optimizer.zero_grad()
        assert model.weight.grad is None


def test_saved_state_continues_with_the_same_bits() -> None:
    model, other = linear(), linear(seed=9)
    with (
        diloco(model, contract_of(steps=50), inner=torch.optim.AdamW(model.parameters(), lr=0.01)) as optimizer,
        diloco(other, contract_of(steps=50), inner=torch.optim.AdamW(other.parameters(), lr=0.5)) as restored,
    ):
        train(model, optimizer, 3)
        other.load_state_dict(model.state_dict())
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert restored.param_groups is restored.inner.param_groups
        assert restored.state is restored.inner.state
        assert restored.param_groups[0]["lr"] == 0.01
        for each, its_model in ((optimizer, model), (restored, other)):
            train(its_model, each, 2, seed=5)
        assert torch.equal(flat(list(model.parameters())), flat(list(other.parameters())))
