"""Claims about the inner optimizer, the learning rate and the inner step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from opendiloco.compute import CompiledLoss
from opendiloco.config import ComputeConfig, Contract, InnerConfig, ModelConfig
from opendiloco.errors import SettingsError
from opendiloco.inner import InnerStepResult, InnerSteps, learning_rate
from opendiloco.loss import causal_lm_loss
from opendiloco.lossscale import GROWTH_STEPS, START, LossScale
from opendiloco.model import build_model
from opendiloco.optimizers import make_inner_optimizer
from opendiloco.ranks import Ranks
from opendiloco.replica import build_replica

VOCAB = 64


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


def inner_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    *,
    config: InnerConfig,
    lr: float,
    micro_batch_size: int = 0,
    precision: Any = "fp32",
) -> InnerStepResult:
    compute = ComputeConfig(micro_batch_size=micro_batch_size, precision=precision)
    return InnerSteps(model, config, compute).step(optimizer, tokens, lr=lr)


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


# --- fp16 ----------------------------------------------------------------------------------------------


def fp16_steps(model: nn.Module, *, micro_batch_size: int = 0) -> InnerSteps:
    return InnerSteps(model, config(), ComputeConfig(precision="fp16", micro_batch_size=micro_batch_size))


@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_fp16_makes_the_fp32_step_within_rounding(model: Any, tokens: Tensor, micro_batch_size: int) -> None:
    half, full = Recorder(model), Recorder(model)
    seen: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    result = fp16_steps(model, micro_batch_size=micro_batch_size).step(half, tokens, lr=0.1)
    assert set(seen) == {torch.float16}
    exact = inner_step(model, full, tokens, config=config(), lr=0.1)
    assert half.gradient.dtype == torch.float32
    assert result.loss == pytest.approx(exact.loss, rel=2e-3)
    assert result.grad_norm == pytest.approx(exact.grad_norm, rel=5e-3)
    assert float((half.gradient - full.gradient).norm() / full.gradient.norm()) < 5e-3


def test_gradients_too_small_for_fp16_are_not_lost(model: Any, tokens: Tensor) -> None:
    """Scaled by 2**-20 they are far below fp16's smallest number."""
    tiny_loss = 2.0**-20
    optimizer, exact = Recorder(model), Recorder(model)
    steps = fp16_steps(model)
    plain = steps._loss
    steps._loss = lambda model, tokens, *, end_id: plain(model, tokens, end_id=end_id) * tiny_loss
    steps.step(optimizer, tokens, lr=0.1)
    inner_step(model, exact, tokens, config=config(), lr=0.1)
    assert float((optimizer.gradient / tiny_loss - exact.gradient).norm() / exact.gradient.norm()) < 0.05


def test_an_overflow_halves_the_scale_until_the_same_batch_has_a_gradient(model: Any, tokens: Tensor) -> None:
    optimizer, steps = Recorder(model), fp16_steps(model)
    expected, exact = Recorder(model), inner_step(model, Recorder(model), tokens, config=config(), lr=0.1)
    fp16_steps(model).step(expected, tokens, lr=0.1)
    largest = float(expected.gradient[-128:].abs().max())  # of the last norm, which overflows
    model.model.norm.weight.register_hook(lambda g: g if g.abs().max() < largest * 3000 else g * math.inf)
    result = steps.step(optimizer, tokens, lr=0.1)
    assert (result.finite, optimizer.steps) == (True, 1)
    assert steps.state_of(optimizer)["loss_scale"] == {"value": 2048.0, "good_steps": 1}
    assert result.grad_norm == pytest.approx(exact.grad_norm, rel=5e-3)
    torch.testing.assert_close(optimizer.gradient, expected.gradient, rtol=0.05, atol=1e-4)


def test_a_gradient_that_no_scale_makes_finite_is_a_bad_number(model: Any, tokens: Tensor) -> None:
    optimizer, steps = Recorder(model), fp16_steps(model)
    model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    result = steps.step(optimizer, tokens, lr=0.1)
    assert (result.finite, optimizer.steps) == (False, 0)
    assert math.isfinite(result.loss)


def test_a_loss_that_is_not_finite_is_not_the_scales_fault(model: Any, tokens: Tensor) -> None:
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    model.lm_head.register_forward_hook(count)
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    optimizer, steps = Recorder(model), fp16_steps(model)
    assert not steps.step(optimizer, tokens, lr=0.1).finite
    assert passes == 1
    assert steps.state_of(optimizer)["loss_scale"]["value"] == START


def test_the_scale_grows_after_many_good_steps_and_its_state_goes_on() -> None:
    scale, restored = LossScale(), LossScale()
    for _ in range(GROWTH_STEPS - 1):
        scale.count_step()
    restored.load_state_dict(scale.state_dict())
    for each in (scale, restored):
        assert each.value == START
        each.count_step()
        assert each.value == 2 * START
    assert scale.lower()
    assert scale.state_dict() == {"value": START, "good_steps": 0}


def test_clipping_sees_the_gradient_without_its_scale(model: Any, tokens: Tensor) -> None:
    clipped = Recorder(model)
    norm = inner_step(model, Recorder(model), tokens, config=config(), lr=0.1).grad_norm
    compute = ComputeConfig(precision="fp16")
    result = InnerSteps(model, config(clip=norm / 4), compute).step(clipped, tokens, lr=0.1)
    assert result.grad_norm == pytest.approx(norm, rel=5e-3)
    assert float(clipped.gradient.norm()) == pytest.approx(norm / 4, rel=5e-3)


# --- memory and compilation ----------------------------------------------------------------------------


def test_checkpointed_activations_give_the_same_gradient_and_are_computed_twice(model: Any, tokens: Tensor) -> None:
    kept, again = Recorder(model), Recorder(model)
    inner_step(model, kept, tokens, config=config(), lr=0.1)
    passes = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    InnerSteps(model, config(), ComputeConfig(checkpoint_activations=True)).step(again, tokens, lr=0.1)
    torch.testing.assert_close(again.gradient, kept.gradient)
    assert len(passes) == 2


def test_checkpointing_that_a_model_cannot_do_is_one_line() -> None:
    with pytest.raises(SettingsError, match=r"checkpoint_activations is true, but Linear does not support it"):
        InnerSteps(nn.Linear(1, 1), config(), ComputeConfig(checkpoint_activations=True))


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["GPU", "CPU"])
@pytest.mark.parametrize(
    ("compute", "line"),
    [
        (
            ComputeConfig(),
            "compute.micro_batch_size is 0, all 8 sequences at once, with 16 tokens a sequence: "
            "try compute.micro_batch_size=4",
        ),
        (
            ComputeConfig(micro_batch_size=3),
            "compute.micro_batch_size is 3, with 16 tokens a sequence: try compute.micro_batch_size=1",
        ),
        (
            ComputeConfig(micro_batch_size=1),
            r"\(compute.micro_batch_size is 1\): try compute.checkpoint_activations=true, or compute.precision=bf16, "
            "or a run with data.seq_len below 16",
        ),
        (
            ComputeConfig(micro_batch_size=1, precision="bf16", checkpoint_activations=True),
            r"\(compute.micro_batch_size is 1\): try a run with data.seq_len below 16 or a smaller model$",
        ),
    ],
)
def test_out_of_memory_says_what_to_try(
    model: Any, tokens: Tensor, compute: ComputeConfig, line: str, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    model.model.layers[1].mlp.register_forward_hook(fail)
    optimizer = Recorder(model)
    with pytest.raises(SettingsError, match=line) as caught:
        InnerSteps(model, config(), compute).step(optimizer, tokens, lr=0.1)
    assert caught.value.exit_code == 64
    assert "\n" not in str(caught.value)
    assert optimizer.steps == 0


@pytest.fixture
def together() -> Iterator[None]:
    """The process group of a worker of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("together")
def test_out_of_memory_of_several_processes_says_what_to_try_with_the_share_of_one(
    model: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.inner._process_count", lambda model: 4)
    model.model.norm.register_forward_hook(partial(_fail, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")))
    trained = DistributedDataParallel(model)
    line = "micro_batch_size is 0, all 2 sequences at once, with 16 tokens a sequence: try compute.micro_batch_size=1"
    with Ranks(0, 4) as ranks, pytest.raises(SettingsError, match=line):
        InnerSteps(model, config(), ComputeConfig(), trained=trained, together=ranks.together).step(
            Recorder(model), tokens, lr=0.1
        )


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("compile", [False, True])
def test_parameters_that_get_no_gradient_are_named_where_several_processes_train(
    model: Any, tokens: Tensor, compiler: list[str], compile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model.vision = nn.Linear(2, 2)
    compute = ComputeConfig(compile=compile)
    assert InnerSteps(model, config(), compute).step(torch.optim.SGD(model.parameters()), tokens, lr=0.1).finite
    steps = InnerSteps(model, config(), compute, trained=DistributedDataParallel(model))
    line = r"vision.weight, vision.bias to be trained, of which text gives no gradient, .* add them to model.frozen"
    with pytest.raises(SettingsError, match=line):
        steps.step(Recorder(model), tokens, lr=0.1)
    assert not caplog.records
    for parameter in model.vision.parameters():
        parameter.requires_grad_(False)
    steps = InnerSteps(model, config(), compute, trained=DistributedDataParallel(model))
    for _ in range(2):
        assert steps.step(torch.optim.SGD(model.parameters()), tokens, lr=0.1).finite


def test_another_runtime_error_is_not_taken_for_a_lack_of_memory(model: Any, tokens: Tensor) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    model.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        inner_step(model, Recorder(model), tokens, config=config(), lr=0.1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.compile with a compiler of its own, which says when it is used; "fails" in the list makes it fail."""
    log: list[str] = []

    def compile(function: Callable[..., Tensor], *, dynamic: bool) -> Callable[..., Tensor]:
        def compiled(model: nn.Module, tokens: Tensor, *, end_id: int | None) -> Tensor:
            log.append(f"pass of {len(tokens)}")
            loss = function(model, tokens, end_id=end_id)
            if "fails in backward" in log:
                loss.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("no such instruction\nat line 3")))
            if "fails" in log:
                raise RuntimeError("no C++ compiler\nat line 3")
            return loss

        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    return log


def test_a_worker_says_that_it_compiles(compiler: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    contract = Contract.model_validate({"data": {"seq_len": 16}, "inner": {"batch_size": 1}})
    compute = ComputeConfig(device="cpu", compile=True)
    build_replica(contract, compute, vocab_size=300, end_id=None, ranks=Ranks())
    assert compiler == ["pass of 1"]
    assert caplog.messages == ["compiling the model (compute.compile), which takes some minutes"]


def test_the_compiled_pass_is_the_one_used_and_is_compiled_before_the_first_step(
    model: Any, tokens: Tensor, compiler: list[str]
) -> None:
    plain, compiled = Recorder(model), Recorder(model)
    inner_step(model, plain, tokens, config=config(), lr=0.1)
    names = list(model.state_dict())
    steps = InnerSteps(model, config(), ComputeConfig(compile=True, micro_batch_size=3))
    steps.compile(16)
    assert compiler == ["pass of 3", "pass of 3", "pass of 2"]  # every size that a step will use
    assert all(parameter.grad is None for parameter in model.parameters())
    steps.step(compiled, tokens, lr=0.1)
    assert len(compiler) == 6
    torch.testing.assert_close(compiled.gradient, plain.gradient, rtol=1e-4, atol=1e-6)
    assert list(model.state_dict()) == names
    assert causal_lm_loss(model, tokens).isfinite()
    assert len(compiler) == 6  # evaluation does without


@pytest.mark.parametrize("where", ["fails", "fails in backward"])
def test_a_compiler_that_fails_costs_one_warning(
    model: Any, tokens: Tensor, compiler: list[str], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.append(where)
    plain, compiled = Recorder(model), Recorder(model)
    inner_step(model, plain, tokens, config=config(), lr=0.1)
    steps = InnerSteps(model, config(), ComputeConfig(compile=True))
    for _ in range(2):
        steps.step(compiled, tokens, lr=0.1)
    assert torch.equal(compiled.gradient, plain.gradient)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "torch.compile failed (RuntimeError: no " in caplog.text
    assert "training goes on without it" in caplog.text
    assert len(compiler) == 2


def test_a_lost_process_is_not_the_compilers_fault(
    model: Any, tokens: Tensor, compiler: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    lost = RuntimeError("[/a/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:1.")
    model.model.norm.register_forward_hook(partial(_fail, lost))
    with pytest.raises(RuntimeError, match="Connection closed"):
        InnerSteps(model, config(), ComputeConfig(compile=True)).step(Recorder(model), tokens, lr=0.1)
    assert not caplog.records


def test_a_model_that_fails_by_itself_fails_with_its_own_error(model: Any, tokens: Tensor, compiler: list[str]) -> None:
    model.model.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        InnerSteps(model, config(), ComputeConfig(compile=True)).step(Recorder(model), tokens, lr=0.1)


def _fail(error: Exception, *_: object) -> None:
    raise error


class Bigram(nn.Module):
    """The smallest language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
def test_torchs_own_compiler_gives_the_plain_gradient(tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # traces, but generates no code
    model = Bigram()
    plain, compiled = Recorder(model), Recorder(model)
    inner_step(model, plain, tokens, config=config(), lr=0.1)
    steps = InnerSteps(model, config(), ComputeConfig(compile=True, micro_batch_size=3))
    steps.step(compiled, tokens, lr=0.1)
    assert isinstance(steps._loss, CompiledLoss)
    assert steps._loss.is_compiled
    torch.testing.assert_close(compiled.gradient, plain.gradient, rtol=1e-4, atol=1e-6)
