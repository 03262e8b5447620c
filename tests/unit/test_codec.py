"""Codecs keep values within their bound, write exact sizes and refuse bytes that no encoder writes."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opendiloco import codec as codec_module
from opendiloco.codec import BLOCK, CODECS, Codec, CodecError, NonFiniteError, accumulate, get_codec
from opendiloco.errors import SettingsError

FLT_MAX = torch.finfo(torch.float32).max
TINY = 2.0**-126
SIZES = (0, 1, 2, 1023, 1024, 1025, 2 * BLOCK, 3 * BLOCK + 7, 64 * BLOCK, 65 * BLOCK + 1)
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def decoded(codec: Codec, data: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), math.nan)
    codec.decode(data, out)
    return out


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, codec.encode(values), values.numel())


def int8_payload(scales: list[float], values: list[int]) -> Tensor:
    return torch.frombuffer(
        bytearray(struct.pack(f"<{len(scales)}f{len(values)}b", *scales, *values)), dtype=torch.uint8
    )


def assert_within_documented_bound(codec: Codec, values: Tensor, result: Tensor) -> None:
    assert bool(torch.isfinite(result).all())
    wide, error = values.double(), (values.double() - result.double()).abs()
    if codec.name == "none":
        assert torch.equal(values.view(torch.int32), result.view(torch.int32))
    elif codec.name == "fp16":
        clamped = wide.clamp(-65504, 65504)
        allowed = (clamped.abs() * 2**-11).clamp(min=2**-25)
        assert bool(((clamped - result.double()).abs() <= allowed).all())
    else:
        for start in range(0, values.numel(), BLOCK):
            block = slice(start, start + BLOCK)
            step = max(float(wide[block].abs().max()) / 127, TINY)
            assert float(error[block].max()) <= step / 2 * (1 + 2**-15)


# A run of values: (value or the magnitude of noise, how many, is it noise). Runs make blocks of all kinds.
edge_floats = st.sampled_from(
    [
        0.0,
        -0.0,
        1.0,
        FLT_MAX,
        -FLT_MAX,
        TINY,
        -TINY,
        2.0**-149,
        -(2.0**-149),
        65504.0,
        65520.0,
        -65519.99,
        1e-7,
    ]
).map(lambda x: float(np.float32(x)))
finite_floats = st.one_of(edge_floats, st.floats(width=32, allow_nan=False, allow_infinity=False))
runs = st.lists(
    st.tuples(finite_floats, st.sampled_from([1, 2, 100, 1022, 1023, 1024, 1025, 3000]), st.booleans()),
    max_size=5,
)


def values_of(pieces: list[tuple[float, int, bool]]) -> Tensor:
    generator = torch.Generator().manual_seed(len(pieces))
    parts = [
        torch.full((count,), value) * (torch.rand(count, generator=generator) * 2 - 1 if noisy else 1.0)
        for value, count, noisy in pieces
    ]
    return torch.cat(parts) if parts else torch.empty(0)


@every_codec
@settings(max_examples=60, deadline=None)
@given(pieces=runs)
def test_any_finite_values_survive_within_the_documented_bound(
    codec: Codec, pieces: list[tuple[float, int, bool]]
) -> None:
    values = values_of(pieces)
    before = values.clone()
    data = codec.encode(values)
    assert data.numel() == codec.wire_bytes(values.numel())
    assert torch.equal(values, before)
    assert_within_documented_bound(codec, values, decoded(codec, data, values.numel()))


@every_codec
@settings(max_examples=60, deadline=None)
@given(values=st.lists(finite_floats, max_size=40))
def test_mixed_huge_and_tiny_values_survive_within_the_documented_bound(codec: Codec, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert_within_documented_bound(codec, tensor, there_and_back(codec, tensor))


@every_codec
@pytest.mark.parametrize("numel", SIZES)
def test_every_size_survives_and_wire_bytes_is_exact(codec: Codec, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
    per_value = {"none": 4 * numel, "fp16": 2 * numel, "int8": numel + 4 * math.ceil(numel / 1024)}
    data = codec.encode(values)
    assert data.dtype == torch.uint8
    assert data.numel() == codec.wire_bytes(numel) == per_value[codec.name]
    assert_within_documented_bound(codec, values, decoded(codec, data, numel))


def test_int8_blocks_do_not_disturb_each_other() -> None:
    values = torch.full((2 * BLOCK,), 1e-6)
    values[:BLOCK] = 1e6
    assert there_and_back(CODECS["int8"], values).tolist() == pytest.approx(values.tolist(), rel=1e-6)


def test_int8_keeps_zeros_zero_and_block_extremes_nearly_exact() -> None:
    values = torch.tensor([0.0, FLT_MAX, -FLT_MAX, 0.0])
    result = there_and_back(CODECS["int8"], values)
    assert result[[0, 3]].tolist() == [0.0, 0.0]
    assert result[1:3].tolist() == pytest.approx([FLT_MAX, -FLT_MAX], rel=1e-6)


@pytest.mark.parametrize("magnitude", [2.0**-149, 1e-42, 1e-37, 1e-36, 1e-30])
def test_int8_never_writes_or_reads_subnormal_numbers(magnitude: float) -> None:
    values = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0)) * magnitude
    data = CODECS["int8"].encode(values)
    scale = float(data[:4].clone().view(torch.float32))
    result = decoded(CODECS["int8"], data, BLOCK)
    assert scale >= TINY
    assert bool(((result == 0) | (result.abs() >= TINY)).all())


def test_int8_decodes_to_the_correctly_rounded_product_of_scale_and_integer() -> None:
    scales = [1.1920930376163597e-07, 0.1, 3.3333334922790527]
    integers = [i % 255 - 127 for i in range(3 * BLOCK)]
    result = decoded(CODECS["int8"], int8_payload(scales, integers), 3 * BLOCK)
    exact = np.repeat(np.array(scales, np.float32).astype(np.float64), BLOCK) * np.array(integers, np.float64)
    assert np.array_equal(result.numpy(), exact.astype(np.float32))  # the fp64 product is exact


def test_fp16_clamps_to_its_range_instead_of_overflowing() -> None:
    values = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, -FLT_MAX])
    assert there_and_back(CODECS["fp16"], values).tolist() == [65504.0] * 4 + [-65504.0]


@every_codec
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1023, 1024, 65 * BLOCK, -1])
def test_non_finite_values_are_refused_wherever_they_are(codec: Codec, bad: float, position: int) -> None:
    values = torch.ones(66 * BLOCK + 5)
    values[position] = bad
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        codec.encode(values)


@every_codec
def test_encoding_is_deterministic_and_does_not_depend_on_chunks_or_addresses(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(70 * BLOCK + 3, generator=torch.Generator().manual_seed(1))
    data = codec.encode(values)
    odd = torch.zeros(data.numel() + 1, dtype=torch.uint8)[1:]
    assert codec.encode(values, odd) is odd
    assert torch.equal(odd, data)
    assert torch.equal(decoded(codec, odd, values.numel()), decoded(codec, data, values.numel()))
    monkeypatch.setattr(codec_module, "_CHUNK", BLOCK)
    assert torch.equal(codec.encode(values.clone()), data)
    assert torch.equal(decoded(codec, odd, values.numel()), there_and_back(codec, values))


@every_codec
def test_slices_at_multiples_of_the_alignment_encode_like_the_whole(codec: Codec) -> None:
    values = torch.randn(5 * codec.alignment + 9, generator=torch.Generator().manual_seed(2))
    cut = 2 * codec.alignment
    pieces = [there_and_back(codec, values[:cut]), there_and_back(codec, values[cut:])]
    assert torch.equal(torch.cat(pieces), there_and_back(codec, values))


@every_codec
@pytest.mark.parametrize("off", [-1, 1, 4, 1024])
@pytest.mark.parametrize("numel", [1, 1024, 1025])
def test_decode_names_expected_and_received_size(codec: Codec, numel: int, off: int) -> None:
    expected = codec.wire_bytes(numel)
    data = torch.zeros(max(expected + off, 0), dtype=torch.uint8)
    out = torch.full((numel,), 7.0)
    with pytest.raises(CodecError, match=rf"^{data.numel()} bytes received .* take {expected}"):
        codec.decode(data, out)
    assert out.tolist() == [7.0] * numel


@every_codec
@settings(max_examples=150, deadline=None)
@given(numel=st.sampled_from([1, 3, 1024, 1027]), data=st.data())
def test_arbitrary_bytes_give_finite_values_or_a_codec_error(codec: Codec, numel: int, data: st.DataObject) -> None:
    head = data.draw(st.binary(max_size=16))
    fill = data.draw(st.integers(0, 255))
    size = codec.wire_bytes(numel) + data.draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
    payload = bytearray((head + bytes([fill]) * size)[:size])
    try:
        result = decoded(codec, torch.frombuffer(payload, dtype=torch.uint8), numel)
    except CodecError:
        return
    assert len(payload) == codec.wire_bytes(numel)
    assert bool(torch.isfinite(result).all())


@pytest.mark.parametrize("name", ["none", "fp16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, -1])
def test_received_non_finite_values_are_refused(name: str, bad: float, position: int) -> None:
    values = torch.ones(65 * BLOCK, dtype=torch.float32 if name == "none" else torch.float16)
    values[position] = bad
    with pytest.raises(NonFiniteError):
        decoded(CODECS[name], values.view(torch.uint8), values.numel())


@pytest.mark.parametrize(
    ("scale", "error", "match"),
    [
        (math.nan, NonFiniteError, "NaN"),
        (math.inf, NonFiniteError, "NaN"),
        (-math.inf, NonFiniteError, "NaN"),
        (-1.0, CodecError, "scales from -1"),
        (-0.0, CodecError, "scales from"),
        (1e-40, CodecError, "scales from"),
        (FLT_MAX / 126, CodecError, "scales from"),
        (FLT_MAX, CodecError, "scales from"),
    ],
)
@pytest.mark.parametrize("block", [0, 1])
def test_int8_scales_that_no_encoder_writes_are_refused(
    scale: float, error: type[CodecError], match: str, block: int
) -> None:
    scales = [1.0, 1.0]
    scales[block] = scale
    with pytest.raises(error, match=match):
        decoded(CODECS["int8"], int8_payload(scales, [1] * (BLOCK + 1)), BLOCK + 1)


def test_int8_value_outside_the_symmetric_range_is_refused() -> None:
    with pytest.raises(CodecError, match="-128"):
        decoded(CODECS["int8"], int8_payload([1.0], [0, -127, -128]), 3)


def test_largest_scale_an_encoder_writes_is_accepted_and_does_not_overflow() -> None:
    data = CODECS["int8"].encode(torch.tensor([FLT_MAX]))
    assert bool(torch.isfinite(decoded(CODECS["int8"], data, 1)).all())
    above = torch.nextafter(data[:4].clone().view(torch.float32), torch.tensor([math.inf]))
    with pytest.raises(CodecError, match="scales from"):
        decoded(CODECS["int8"], int8_payload([float(above)], [127]), 1)


@every_codec
def test_accumulate_is_a_rounded_product_then_a_rounded_sum(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(3)
    values, start = torch.randn(2, 66 * BLOCK + 1, generator=generator).unbind()
    data, accumulator, scratch = codec.encode(values), start.clone(), torch.empty(70 * BLOCK)
    accumulate(codec, data, weight=0.1, accumulator=accumulator, scratch=scratch)
    product = there_and_back(codec, values).numpy() * np.float32(0.1)
    assert np.array_equal(accumulator.numpy(), start.numpy() + product)


@every_codec
def test_accumulate_leaves_the_accumulator_alone_when_bytes_are_refused(codec: Codec) -> None:
    accumulator, scratch = torch.ones(66 * BLOCK), torch.empty(66 * BLOCK)
    data = torch.full((codec.wire_bytes(accumulator.numel()),), 0xFF, dtype=torch.uint8)
    data[: data.numel() // 2] = codec.encode(accumulator)[: data.numel() // 2]
    data[-1] = 0x80
    if codec.name != "int8":
        data[-2] = 0x7F
        data[-1] = 0xFF
    with pytest.raises(CodecError):
        accumulate(codec, data, weight=1.0, accumulator=accumulator, scratch=scratch)
    with pytest.raises(CodecError, match="bytes received"):
        accumulate(codec, data[1:], weight=1.0, accumulator=accumulator, scratch=scratch)
    with pytest.raises(ValueError, match="scratch holds"):
        accumulate(codec, data, weight=1.0, accumulator=accumulator, scratch=scratch[1:])
    assert accumulator.tolist() == [1.0] * accumulator.numel()


@pytest.mark.parametrize(
    ("values", "out"),
    [
        (torch.ones(4, dtype=torch.float64), None),
        (torch.ones(2, 2), None),
        (torch.ones(8)[::2], None),
        (torch.ones(4, device="meta"), None),
        (torch.ones(4), torch.empty(7, dtype=torch.uint8)),
        (torch.ones(4), torch.empty(8, dtype=torch.int8)),
    ],
)
def test_tensors_that_do_not_fit_are_a_programming_error(values: Tensor, out: Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"must be|holds 7 bytes"):
        CODECS["int8"].encode(values, out)


def test_codecs_are_found_by_the_names_of_the_setting() -> None:
    assert [get_codec(name).name for name in ("none", "fp16", "int8")] == ["none", "fp16", "int8"]
    with pytest.raises(SettingsError, match=r"outer\.codec is 'int4': use one of none, fp16, int8"):
        get_codec("int4")
