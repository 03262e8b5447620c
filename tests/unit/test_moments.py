"""AdamW's moments travel as flat vectors, and make the optimizer that takes them go on as the one that gave them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from opendiloco.moments import load_moments, store_moments


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    size = sum(parameter.numel() for parameter in model.parameters())
    first, second = torch.empty(size), torch.empty(size)
    store_moments(optimizer, list(model.parameters()), first, second)
    return first, second


def test_a_joiner_with_a_donors_moments_makes_the_donors_next_step() -> None:
    donor = nn.Linear(5, 3)
    giving = adamw(donor)
    train(donor, giving, 10, seed=0)
    joiner = copy.deepcopy(donor)
    taking = adamw(joiner)
    load_moments(taking, list(joiner.parameters()), *moments_of(donor, giving), step=10)
    for model, optimizer in ((donor, giving), (joiner, taking)):
        train(model, optimizer, 3, seed=1)
    for mine, theirs in zip(joiner.parameters(), donor.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_optimizer_without_moments_gives_zeros() -> None:
    model = nn.Linear(5, 3)
    assert not any(vector.any() for vector in moments_of(model, adamw(model)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_moments_that_make_no_sense_are_not_used(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(5, 3)
    optimizer = adamw(model)
    second = torch.ones(18)
    second[7] = bad
    load_moments(optimizer, list(model.parameters()), torch.ones(18), second, step=10)
    assert not optimizer.state
    assert "make no sense" in caplog.text


@pytest.mark.parametrize(("capturable", "place"), [(True, "meta"), (False, "cpu")])
def test_steps_are_counted_where_the_optimizer_counts_them(capturable: bool, place: str) -> None:
    """Fused and capturable AdamW count on the parameters' device; meta stands for a GPU here."""
    model = nn.Linear(5, 3, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=capturable)
    load_moments(optimizer, list(model.parameters()), torch.ones(18), torch.ones(18), step=10)
    assert {state["step"].device.type for state in optimizer.state.values()} == {place}
    assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"meta"}
