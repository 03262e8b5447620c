"""The flat vector holds every trainable value once, in one order, and untrained replicas differ by exactly 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opendiloco import flat as flat_module
from opendiloco.errors import SettingsError
from opendiloco.flat import FlatLayout, gather, scatter, trainable_parameters, write_pseudo_gradient

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TiedModel(nn.Module):
    """Input and output embedding are one parameter, as in small Llama models; one layer is frozen."""

    def __init__(self, *, vocabulary: int = 7, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> TiedModel:
    torch.manual_seed(seed)
    return TiedModel().to(dtype)


def flat_of(model: nn.Module) -> Tensor:
    out = torch.empty(FlatLayout.of(model).numel)
    gather(trainable_parameters(model), out)
    return out


def test_layout_counts_tied_parameters_once_and_frozen_ones_and_buffers_not_at_all() -> None:
    layout = FlatLayout.of(model_of())
    assert [(entry.name, entry.shape, entry.offset, entry.numel) for entry in layout.entries] == [
        ("gain", (), 0, 1),
        ("nothing", (0, 3), 1, 0),
        ("embed.weight", (7, 4), 1, 28),
        ("norm.weight", (4,), 29, 4),
        ("norm.bias", (4,), 33, 4),
    ]
    assert layout.numel == 37


def test_layout_and_trainable_parameters_have_the_same_order() -> None:
    model = model_of()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in trainable_parameters(model)] == [e.name for e in FlatLayout.of(model).entries]


def test_gather_puts_each_value_where_the_layout_says() -> None:
    model = model_of(dtype=torch.bfloat16)
    flat = flat_of(model)
    parameters = dict(model.named_parameters())
    for entry in FlatLayout.of(model).entries:
        values = flat[entry.offset : entry.offset + entry.numel].view(entry.shape)
        assert torch.equal(values, parameters[entry.name].detach().float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_then_gather_gives_back_values_rounded_to_the_parameter_dtype(dtype: torch.dtype) -> None:
    model, flat = model_of(dtype=dtype), torch.randn(37)
    scatter(flat, trainable_parameters(model))
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert torch.equal(flat_of(model), flat.to(dtype).float())


def test_scatter_changes_neither_frozen_parameters_nor_buffers_nor_the_tie() -> None:
    model = model_of()
    frozen, mean = model.frozen.weight.clone(), model.norm.running_mean.clone()  # type: ignore[union-attr]
    scatter(torch.randn(37), trainable_parameters(model))
    assert torch.equal(model.frozen.weight, frozen)
    assert torch.equal(model.norm.running_mean, mean)  # type: ignore[arg-type]
    assert model.head.weight is model.embed.weight
    assert all(parameter.requires_grad for parameter in trainable_parameters(model))


def test_parameters_that_are_not_contiguous_are_gathered_and_scattered_in_logical_order() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    out = torch.empty(6)
    gather([parameter], out)
    assert out.tolist() == [0, 3, 1, 4, 2, 5]
    scatter(out * 2, [parameter])
    assert torch.equal(parameter, torch.arange(6.0).view(2, 3).t() * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_replica_that_has_not_trained_has_a_pseudo_gradient_of_exactly_zero(dtype: torch.dtype) -> None:
    model, theta = model_of(dtype=dtype), torch.randn(37) / 3
    scatter(theta, trainable_parameters(model))
    out = torch.full_like(theta, 9.0)
    write_pseudo_gradient(theta, trainable_parameters(model), out)
    assert out.tolist() == [0.0] * 37


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_pseudo_gradient_is_what_the_replica_started_from_minus_where_it_is(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_module, "_CHUNK", chunk)
    model, theta = model_of(dtype=dtype), torch.randn(37) / 3
    parameters = trainable_parameters(model)
    scatter(theta, parameters)
    started, before = flat_of(model), theta.clone()
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    out = torch.empty_like(theta)
    write_pseudo_gradient(theta, parameters, out)
    assert torch.equal(out, started - flat_of(model))
    assert bool((out != 0).any())
    assert torch.equal(theta, before)


def test_moving_theta_by_minus_the_pseudo_gradient_gives_the_replica_back() -> None:
    model, theta = model_of(seed=1), flat_of(model_of(seed=2))
    out = torch.empty_like(theta)
    write_pseudo_gradient(theta, trainable_parameters(model), out)
    torch.testing.assert_close(theta - out, flat_of(model))


@pytest.mark.parametrize(
    "call",
    [
        lambda parameters, vector: gather(parameters, vector),
        lambda parameters, vector: scatter(vector, parameters),
        lambda parameters, vector: write_pseudo_gradient(vector, parameters, torch.zeros(37)),
        lambda parameters, vector: write_pseudo_gradient(torch.zeros(37), parameters, vector),
    ],
)
@pytest.mark.parametrize(
    ("vector", "match"),
    [
        (torch.zeros(36), "holds 36 values and the parameters 37"),
        (torch.zeros(38), "holds 38 values and the parameters 37"),
        (torch.zeros(37, dtype=torch.float64), "must be fp32"),
        (torch.zeros(37, 1), "must be fp32"),
        (torch.zeros(74)[::2], "must be fp32"),
    ],
)
def test_vectors_that_do_not_fit_are_refused_before_anything_is_written(
    call: Callable[[list[nn.Parameter], Tensor], None], vector: Tensor, match: str
) -> None:
    model, before = model_of(), flat_of(model_of())
    with pytest.raises(ValueError, match=match):
        call(trainable_parameters(model), vector)
    assert not vector.any()
    assert torch.equal(flat_of(model), before)


def test_model_without_trainable_parameters_has_an_empty_vector() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    empty = torch.empty(0)
    assert FlatLayout.of(model).numel == 0
    gather(trainable_parameters(model), empty)
    scatter(empty, trainable_parameters(model))
    write_pseudo_gradient(empty, trainable_parameters(model), torch.empty(0))
    with pytest.raises(ValueError, match="holds 1 values and the parameters 0"):
        gather([], torch.empty(1))


def test_complex_parameters_are_refused_with_their_name() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(SettingsError, match=r"parameter phase is torch[.]complex64"):
        FlatLayout.of(model)


def with_parameters(**parameters: Tensor) -> nn.Module:
    model = nn.Module()
    for name, value in parameters.items():
        model.register_parameter(name, nn.Parameter(value))
    return model


def test_digest_depends_on_layout_and_not_on_values() -> None:
    assert FlatLayout.of(model_of(seed=1)) == FlatLayout.of(model_of(seed=2))
    assert len(bytes.fromhex(FlatLayout.of(model_of()).digest)) == 32


def test_digest_tells_names_shapes_dtypes_order_and_frozen_parameters_apart() -> None:
    frozen = with_parameters(a=torch.zeros(2, 3), b=torch.zeros(1))
    next(iter(frozen.parameters())).requires_grad_(False)
    models = [
        with_parameters(a=torch.zeros(2, 3), b=torch.zeros(1)),
        with_parameters(b=torch.zeros(1), a=torch.zeros(2, 3)),
        with_parameters(a=torch.zeros(3, 2), b=torch.zeros(1)),
        with_parameters(a=torch.zeros(6), b=torch.zeros(1)),
        with_parameters(a=torch.zeros(2, 3), b=torch.zeros(())),
        with_parameters(a=torch.zeros(2, 3), c=torch.zeros(1)),
        with_parameters(a=torch.zeros(2, 3, dtype=torch.bfloat16), b=torch.zeros(1)),
        with_parameters(a=torch.zeros(2, 3)),
        with_parameters(ab=torch.zeros(2, 3)),
        with_parameters(),
        frozen,
    ]
    assert len({FlatLayout.of(model).digest for model in models}) == len(models)
