"""Inner optimizers beyond AdamW: what each of them moves, that their state survives, and what they say when missing."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opendiloco import optimizers
from opendiloco.checkpoint import copy_to_host
from opendiloco.config import ComputeConfig, InnerConfig, ModelConfig
from opendiloco.errors import SettingsError
from opendiloco.inner import InnerSteps
from opendiloco.model import build_model
from opendiloco.optimizers import MuonAndAdamW, make_inner_optimizer

VOCAB = 64


def tiny() -> Any:
    return build_model(ModelConfig(), vocab_size=VOCAB, seq_len=16, seed=0)


def batch(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, config: InnerConfig, seeds: Sequence[int]) -> list[float]:
    steps = InnerSteps(model, config, ComputeConfig())
    return [steps.step(optimizer, batch(seed), lr=config.lr).loss for seed in seeds]


def values(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_muon_moves_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = tiny()
    optimizer = make_inner_optimizer(model, InnerConfig(optimizer="muon", lr=0.01, muon_lr=0.03, weight_decay=0.2))
    matrices, embeddings, vectors = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_muon = {names[id(parameter)] for parameter in matrices["params"]}
    assert of_muon == {name for name in names.values() if ".self_attn." in name or ".mlp." in name}
    assert [names[id(parameter)] for parameter in embeddings["params"]] == ["model.embed_tokens.weight"]
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.2, 0.0]
    InnerSteps(model, InnerConfig(), ComputeConfig()).step(optimizer, batch(0), lr=0.005)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.015, 0.005, 0.005])


def test_an_untied_head_is_adamws() -> None:
    model = build_model(ModelConfig(), vocab_size=VOCAB, seq_len=16, seed=0)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    matrices, rest, _ = make_inner_optimizer(model, InnerConfig(optimizer="muon")).param_groups
    assert any(model.lm_head.weight is parameter for parameter in rest["params"])
    assert not any(model.lm_head.weight is parameter for parameter in matrices["params"])


def test_muons_steps_are_torchs_with_the_size_of_adamws() -> None:
    model = nn.Linear(32, 16)
    twin = copy.deepcopy(model)
    config = InnerConfig(optimizer="muon", lr=0.01, weight_decay=0.1)
    ours = make_inner_optimizer(model, config)
    muon = torch.optim.Muon([twin.weight], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([twin.bias], lr=0.01, weight_decay=0.0, betas=config.betas)
    for seed in range(3):
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
        for each in (model, twin):
            each.zero_grad()
            each(inputs).square().sum().backward()
        before = model.weight.detach().clone()
        ours.step()
        muon.step()
        adamw.step()
        size = float((model.weight.detach() - before * (1 - 0.01 * 0.1)).square().mean().sqrt())
        assert size == pytest.approx(0.2 * 0.01, rel=0.5)
    torch.testing.assert_close(model.weight, twin.weight)
    torch.testing.assert_close(model.bias, twin.bias)


@pytest.mark.parametrize("name", ["muon", "adamw8bit"])
def test_it_learns_and_its_state_goes_on_with_the_same_bits(name: Any, tmp_path: Any) -> None:
    config = InnerConfig(optimizer=name, lr=3e-3, batch_size=4)
    model, other = tiny(), tiny()
    optimizer = make_inner_optimizer(model, config)
    losses = train(model, optimizer, config, [0] * 4)
    assert losses[-1] < losses[0] - 0.1
    torch.save(copy_to_host(optimizer.state_dict()), tmp_path / "inner.pt")
    other.load_state_dict(model.state_dict())
    restored = make_inner_optimizer(other, config)
    restored.load_state_dict(torch.load(tmp_path / "inner.pt", weights_only=True))
    for each, its_model in ((optimizer, model), (restored, other)):
        train(its_model, each, config, range(2))
    assert torch.equal(values(model), values(other))


def test_eight_bit_moments_step_nearly_as_adamws() -> None:
    full, small = tiny(), tiny()
    start = values(full)
    losses = [
        train(model, make_inner_optimizer(model, config), config, range(4))
        for model, config in ((full, InnerConfig(lr=1e-3)), (small, InnerConfig(lr=1e-3, optimizer="adamw8bit")))
    ]
    assert losses[1] == pytest.approx(losses[0], abs=0.01)
    moved, difference = values(full) - start, values(small) - values(full)
    assert 0 < float(difference.norm() / moved.norm()) < 0.3


def test_eight_bit_moments_take_a_byte_each() -> None:
    model = tiny()
    config = InnerConfig(optimizer="adamw8bit")
    optimizer = make_inner_optimizer(model, config)
    train(model, optimizer, config, range(1))
    state = optimizer.state[model.model.embed_tokens.weight]
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)


def test_a_frozen_parameter_is_in_no_group() -> None:
    model = tiny()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    for name in ("adamw", "adamw8bit", "muon"):
        groups = make_inner_optimizer(model, InnerConfig(optimizer=name)).param_groups
        listed = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_torch_without_muon_and_bitsandbytes_without_kernels_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(
        SettingsError, match=r"^inner.optimizer is muon, which torch .* does not have: install torch 2.9"
    ):
        make_inner_optimizer(tiny(), InnerConfig(optimizer="muon"))

    def no_kernels(*_: object) -> torch.optim.Optimizer:
        raise NotImplementedError("no kernel for cpu\nat line 7")

    monkeypatch.setattr(optimizers, "_adamw8bit", no_kernels)
    with pytest.raises(SettingsError, match=r"adamw8bit, which bitsandbytes cannot compute on cpu here \(no kernel"):
        make_inner_optimizer(tiny(), InnerConfig(optimizer="adamw8bit"))


def test_a_model_of_vectors_alone_has_no_group_of_muon() -> None:
    model = nn.LayerNorm(4)
    optimizer = make_inner_optimizer(model, InnerConfig(optimizer="muon"))
    assert isinstance(optimizer, MuonAndAdamW)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert math.isfinite(float(model.bias.detach().sum()))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
