"""Claims about the inner optimizer, the learning rate and the inner step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opendiloco.config import InnerConfig, ModelConfig
from opendiloco.inner import inner_step, learning_rate, make_inner_optimizer
from opendiloco.model import build_model, causal_lm_loss

VOCAB = 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other crawl on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recorder(torch.optim.SGD):
    """Stands for the project's wrapping optimizer: counts steps and keeps the gradients it was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.steps = 0
        self.gradient = torch.empty(0)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.gradient = torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])


@pytest.fixture
def model() -> Any:
    return build_model(ModelConfig(), vocab_size=VOCAB, seq_len=16, seed=0)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (8, 16), generator=torch.Generator().manual_seed(0))


def config(
    *, lr: float = 0.1, warmup_steps: int = 10, schedule: Any = "cosine", ratio: float = 0.1, clip: float = 0.0
) -> InnerConfig:
    return InnerConfig(lr=lr, warmup_steps=warmup_steps, schedule=schedule, min_lr_ratio=ratio, clip_norm=clip)


# --- learning rate -------------------------------------------------------------------------------------


def test_warm_up_is_linear_and_starts_above_zero() -> None:
    rates = [learning_rate(step, config=config(), total_steps=100) for step in range(10)]
    assert rates == pytest.approx([0.01 * (step + 1) for step in range(10)])


def test_cosine_falls_from_the_peak_to_its_floor_at_the_last_step() -> None:
    rates = [learning_rate(step, config=config(), total_steps=100) for step in range(9, 101)]
    assert rates[0] == rates[1] == 0.1
    assert rates[46] == pytest.approx((0.1 + 0.01) / 2)
    assert rates[-1] == pytest.approx(0.01)
    assert all(later < earlier for earlier, later in pairwise(rates[1:]))
    assert learning_rate(10_000, config=config(), total_steps=100) == pytest.approx(0.01)


def test_constant_schedule_stays_at_the_peak() -> None:
    assert {learning_rate(s, config=config(schedule="constant"), total_steps=100) for s in (9, 10, 99, 500)} == {0.1}


@pytest.mark.parametrize("total_steps", [1, 5, 10, 11])
@pytest.mark.parametrize("warmup_steps", [0, 1, 10])
def test_short_runs_have_a_positive_finite_rate(total_steps: int, warmup_steps: int) -> None:
    settings = config(warmup_steps=warmup_steps)
    for step in range(total_steps + 2):
        assert 0 < learning_rate(step, config=settings, total_steps=total_steps) <= 0.1


# --- optimizer -----------------------------------------------------------------------------------------


def test_every_trained_parameter_is_in_one_group_and_vectors_do_not_decay(model: Any) -> None:
    frozen = model.model.layers[0].mlp.up_proj.weight
    frozen.requires_grad_(False)
    optimizer = make_inner_optimizer(model, InnerConfig(weight_decay=0.3, betas=(0.8, 0.9)))
    decayed, kept = optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert decayed["betas"] == (0.8, 0.9)
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p is not frozen)


def test_fused_adamw_steps_like_the_formula() -> None:
    model = nn.Linear(3, 1, bias=False)
    settings = InnerConfig(lr=0.01, weight_decay=0.1)
    optimizer = make_inner_optimizer(model, settings)
    assert optimizer.param_groups[0]["fused"]
    start, gradient = model.weight.detach().clone(), torch.tensor([[1.0, -2.0, 3.0]])
    model.weight.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), start * (1 - 0.01 * 0.1) - 0.01 * gradient.sign())


# --- inner step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 100])
def test_micro_batches_give_the_gradient_of_the_whole_batch(model: Any, tokens: Tensor, micro_batch_size: int) -> None:
    whole, parts = Recorder(model), Recorder(model)
    expected = inner_step(model, whole, tokens, config=config(), lr=0.1)
    result = inner_step(model, parts, tokens, config=config(), lr=0.1, micro_batch_size=micro_batch_size)
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-4, atol=1e-6)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert parts.steps == 1


def test_loss_is_that_of_the_batch_before_the_step(model: Any, tokens: Tensor) -> None:
    before = causal_lm_loss(model, tokens).item()
    result = inner_step(model, make_inner_optimizer(model, config()), tokens, config=config(), lr=1e-3)
    assert result.loss == pytest.approx(before, rel=1e-6)
    assert result.tokens == 8 * 16
    assert result.finite
    assert causal_lm_loss(model, tokens).item() < before


def test_clipping_comes_after_accumulation_and_the_norm_is_from_before(model: Any, tokens: Tensor) -> None:
    free, clipped = Recorder(model), Recorder(model)
    norm = inner_step(model, free, tokens, config=config(), lr=0.1).grad_norm
    assert float(free.gradient.norm()) == pytest.approx(norm, rel=1e-4)
    result = inner_step(model, clipped, tokens, config=config(clip=norm / 4), lr=0.1, micro_batch_size=3)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    torch.testing.assert_close(clipped.gradient, free.gradient / 4, rtol=1e-3, atol=1e-6)


def test_learning_rate_reaches_every_group_and_stale_gradients_do_not_count(model: Any, tokens: Tensor) -> None:
    recorder, clean = Recorder(model), Recorder(model)
    inner_step(model, clean, tokens, config=config(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner_step(model, recorder, tokens, config=config(), lr=0.025)
    assert {group["lr"] for group in recorder.param_groups} == {0.025}
    torch.testing.assert_close(recorder.gradient, clean.gradient)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_loss_that_is_not_finite_makes_no_step(model: Any, tokens: Tensor) -> None:
    optimizer = Recorder(model)
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    result = inner_step(model, optimizer, tokens, config=config(clip=1.0), lr=0.1)
    assert (math.isnan(result.loss), result.finite, optimizer.steps) == (True, False, 0)


def test_gradient_that_is_not_finite_makes_no_step(model: Any, tokens: Tensor) -> None:
    optimizer = Recorder(model)
    model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    result = inner_step(model, optimizer, tokens, config=config(clip=1.0), lr=0.1)
    assert math.isfinite(result.loss)
    assert not math.isfinite(result.grad_norm)
    assert (result.finite, optimizer.steps) == (False, 0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bf16_computes_in_bf16_and_keeps_fp32_parameters_and_gradients(model: Any, tokens: Tensor) -> None:
    optimizer, exact = Recorder(model), Recorder(model)
    seen = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    result = inner_step(model, optimizer, tokens, config=config(), lr=0.1, precision="bf16")
    full = inner_step(model, exact, tokens, config=config(), lr=0.1)
    assert seen == [torch.bfloat16, torch.float32]
    assert optimizer.gradient.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert result.loss == pytest.approx(full.loss, rel=0.01)
    assert not torch.equal(optimizer.gradient, exact.gradient)
