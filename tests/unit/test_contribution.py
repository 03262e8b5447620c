"""A worker's contribution: what is encoded, what is kept, and what its bytes stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opendiloco.codec import BLOCK, CODECS, NonFiniteError, get_codec
from opendiloco.contribution import Contribution
from opendiloco.errors import SettingsError

SHAPES = ((33, 40), (7,), (1,), (2000,))
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)


def replica(codec: str, dtype: torch.dtype = torch.float32) -> tuple[Contribution, list[Tensor], Tensor, Tensor]:
    """A contribution with its parameters, theta, and the bytes that others get."""
    theta = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    parameters = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    sent = torch.empty(get_codec(codec).wire_bytes(NUMEL), dtype=torch.uint8)
    contribution = Contribution(parameters, get_codec(codec), theta, sent)
    contribution.restart()
    return contribution, parameters, theta, sent


def flat(parameters: list[Tensor]) -> Tensor:
    return torch.cat([parameter.flatten().float() for parameter in parameters])


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_the_encoded_difference_to_what_the_replica_started_from(codec: str, dtype: torch.dtype) -> None:
    contribution, parameters, theta, sent = replica(codec, dtype)
    for parameter in parameters:
        parameter.mul_(0.75)
    expected = theta.to(dtype).float() - flat(parameters)
    assert contribution.measure() == pytest.approx(float(torch.linalg.vector_norm(expected)))
    contribution.encode()
    assert torch.equal(sent, get_codec(codec).encode(expected))


def test_late_work_goes_on_top_of_the_new_theta_exactly() -> None:
    contribution, parameters, theta, _ = replica("int8")
    before = theta.clone()
    for parameter in parameters:
        parameter.add_(0.125)
    trained = flat(parameters)
    contribution.measure()
    theta.add_(1.0)
    contribution.restart(keep_work=True)
    assert torch.equal(flat(parameters), theta - (before - trained))


def test_values_that_are_not_finite_are_not_encoded() -> None:
    contribution, parameters, _, _ = replica("int8")
    parameters[0][3, 3] = torch.inf
    assert not torch.isfinite(torch.tensor(contribution.measure()))
    with pytest.raises(NonFiniteError):
        contribution.encode()


@given(codec=st.sampled_from(list(CODECS)), numel=st.integers(0, 5 * BLOCK), data=st.data())
def test_a_cut_is_what_its_values_alone_are_encoded_to(codec: str, numel: int, data: st.DataObject) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    first = data.draw(st.integers(0, numel // BLOCK))
    blocks = data.draw(st.integers(0, -(-numel // BLOCK) - first if numel else 0))
    part = slice(min(first * BLOCK, numel), min((first + blocks) * BLOCK, numel))
    encoded = get_codec(codec).encode(values)
    assert torch.equal(get_codec(codec).cut(encoded, numel, part), get_codec(codec).encode(values[part]))


def test_parameters_that_somebody_moves_are_followed() -> None:
    """accelerate moves a model to the GPU after DiLoCo has seen it; meta stands for the GPU here."""
    contribution, parameters, _, _ = replica("none")
    contribution.measure()
    parameters[:] = [parameter.to("meta") for parameter in parameters]
    contribution.restart(keep_work=True)
    assert (contribution._anchor.device.type, contribution._gradient.device.type) == ("meta", "meta")


def test_a_device_without_room_for_diloco_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    theta = torch.zeros(10_000_000)
    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(SettingsError, match=r"DiLoCo needs 0.08 GB on meta beside .* 2 fp32 copies of the 10000000"):
        Contribution([torch.zeros(10_000_000, device="meta")], get_codec("none"), theta, torch.empty(0))
