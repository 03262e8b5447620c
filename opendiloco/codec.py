"""Codecs: how fp32 values travel between peers.

    none   4 bytes a value      raw little-endian fp32
    fp16   2 bytes a value      IEEE half precision, clamped to its range
    int8   1.004 bytes a value  block-wise absmax, one fp32 scale per block of 1024 values

Bytes come from peers nobody vouches for. So `decode` is told by its caller how many values it may write,
compares sizes before it touches anything, and hands out finite values or an error, nothing else. All
decoding is a sequence of single IEEE operations, so that every machine reads the same values.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from opendiloco.errors import OpendilocoError, SettingsError

BLOCK = 1024
"""Values that share one int8 scale; slices of a flat vector start at multiples of it, whatever the codec."""

_CHUNK = 64 * BLOCK  # values worked on at a time: 256 KiB of fp32, which stays in a core's cache
_HOST = torch.device("cpu")
_FP16_MAX = 65504.0
_INT8_MAX = 127
_MIN_SCALE = torch.finfo(torch.float32).tiny  # 2**-126: products with it are normal, or exactly zero
_MAX_SCALE = float.fromhex("0x1.020406p+121")  # the largest fp32 whose product with 127 does not overflow

if sys.byteorder != "little":
    raise ImportError("opendiloco sends tensors as they lie in memory: it needs a little-endian machine")


class CodecError(OpendilocoError):
    """Bytes that are not an encoding of the expected number of finite values."""


class NonFiniteError(CodecError):
    """NaN or infinity, in values to encode or in received ones."""


class Codec(ABC):
    """A way to write fp32 values as bytes. Stateless: one instance may serve many threads.

    Tensors are one-dimensional and contiguous; uint8 tensors may start at any address. Values are encoded on the
    device where they are, and decoded on the host.
    """

    name: ClassVar[str]
    alignment: ClassVar[int] = BLOCK
    """Slices of a flat vector start at multiples of it (values)."""

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Exact size in bytes of `numel` encoded values."""

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Write `values` as bytes. Equal values give equal bytes.

        Args:
            values: fp32 [n], n >= 0; only read.
            out: uint8 [wire_bytes(n)] to write into and return; allocated when missing.

        Raises:
            NonFiniteError: a value is NaN or infinite; what `out` then holds is undefined.
            ValueError: a tensor of the wrong size, type or place.
        """
        device = values.device if values.device.type == "cuda" else _HOST
        _require(values, torch.float32, "values", device=device)
        size = self.wire_bytes(values.numel())
        out = torch.empty(size, dtype=torch.uint8, device=device) if out is None else out
        _require(out, torch.uint8, "out", device=device)
        if out.numel() != size:
            raise ValueError(
                f"out holds {out.numel()} bytes: {values.numel()} values need {size} with codec {self.name}"
            )
        self._encode(values, out)
        return out

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Read n values from bytes that need not be trusted; `out` decides how many.

        Args:
            data: uint8 [wire_bytes(n)]; only read.
            out: fp32 [n]; all finite afterwards. After an error its content is undefined.

        Raises:
            CodecError: wrong size, or bytes that no encoder writes.
            NonFiniteError: the bytes stand for NaN or infinity.
            ValueError: a tensor of the wrong type or place.
        """
        _require(data, torch.uint8, "data")
        _require(out, torch.float32, "out")
        expected = self.wire_bytes(out.numel())
        if data.numel() != expected:
            raise CodecError(
                f"{data.numel()} bytes received where {out.numel()} values with codec {self.name} "
                f"take {expected}: drop this sender"
            )
        self._decode(data, out)

    def cut(self, data: Tensor, numel: int, part: slice) -> Tensor:
        """The bytes that stand for some of the values: what `encode` gives for these alone.

        Args:
            data: uint8 [wire_bytes(numel)], all of them.
            part: starts at a multiple of `alignment`, and ends at one or at `numel`.
        """
        width = self.wire_bytes(1)
        return data[width * part.start : width * part.stop]

    @abstractmethod
    def _encode(self, values: Tensor, out: Tensor) -> None: ...  # types and sizes are checked

    @abstractmethod
    def _decode(self, data: Tensor, out: Tensor) -> None: ...  # types and sizes are checked


class NoneCodec(Codec):
    """Raw little-endian fp32: exact, 4 bytes a value."""

    name = "none"

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, values: Tensor, out: Tensor) -> None:
        for chunk in _chunks(values.numel()):
            require_finite(values[chunk], "encode")
            _bytes_of(out, chunk, 4).copy_(values[chunk].view(torch.uint8))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        for chunk in _chunks(out.numel()):
            out[chunk].view(torch.uint8).copy_(_bytes_of(data, chunk, 4))
            require_finite(out[chunk], "decode")


class Fp16Codec(Codec):
    """IEEE half precision, 2 bytes a value.

    Error: at most 2**-11 of the value, or 2**-25 where that is more (below 2**-14 halves are subnormal).
    Finite values beyond +-65504 are clamped to it: a pseudo-gradient that large comes from a replica that
    diverges, and a bounded share of it in one average harms less than a round that nobody can commit.
    """

    name = "fp16"

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: Tensor, out: Tensor) -> None:
        clamped = torch.empty(min(_CHUNK, values.numel()), dtype=torch.float32, device=values.device)
        halves = torch.empty_like(clamped, dtype=torch.float16)
        for chunk in _chunks(values.numel()):
            size = chunk.stop - chunk.start
            require_finite(values[chunk], "encode")
            torch.clamp(values[chunk], -_FP16_MAX, _FP16_MAX, out=clamped[:size])
            halves[:size].copy_(clamped[:size])
            _bytes_of(out, chunk, 2).copy_(halves[:size].view(torch.uint8))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        halves = torch.empty(min(_CHUNK, out.numel()), dtype=torch.float16)
        for chunk in _chunks(out.numel()):
            size = chunk.stop - chunk.start
            halves[:size].view(torch.uint8).copy_(_bytes_of(data, chunk, 2))
            out[chunk].copy_(halves[:size])
            require_finite(out[chunk], "decode")


class Int8Codec(Codec):
    """Block-wise absmax: each block of 1024 values has one scale, values are whole multiples of it.

    Layout: ceil(n / 1024) fp32 scales, then n int8 values in -127 ... 127; the last block may be shorter.
    A block's scale (its quantization step) is max(absmax / 127, 2**-126). Error of a value: at most half a
    step (times 1 + 2**-15 for the rounding of the arithmetic itself). The floor keeps subnormal numbers out
    of scales and decoded values, so that machines that flush them to zero still agree; it costs exactness
    only in blocks whose every value is below 1.5e-36.

    Decoding is one exact conversion and one IEEE multiplication per value.
    """

    name = "int8"

    def wire_bytes(self, numel: int) -> int:
        return 4 * _block_count(numel) + numel

    def cut(self, data: Tensor, numel: int, part: slice) -> Tensor:
        scales = data[4 * (part.start // BLOCK) : 4 * _block_count(part.stop)]
        first = 4 * _block_count(numel)
        return torch.cat([scales, data[first + part.start : first + part.stop]])

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if not values.numel():
            return
        scales = torch.empty(_block_count(values.numel()), 1, dtype=torch.float32, device=values.device)
        quantized = out[scales.nbytes :].view(torch.int8)
        scratch = torch.empty(min(_CHUNK, values.numel()), dtype=torch.float32, device=values.device)
        for chunk, blocks, shape in _block_chunks(values.numel()):
            source, work, scale = values[chunk].view(shape), scratch[: shape[0] * shape[1]], scales[blocks]
            torch.abs(source, out=work.view(shape))
            torch.amax(work.view(shape), 1, keepdim=True, out=scale)  # NaN and infinity show up here
            scale.div_(_INT8_MAX).clamp_(min=_MIN_SCALE)
            torch.mul(source, scale.reciprocal(), out=work.view(shape))
            quantized[chunk].copy_(work.round_())
        require_finite(scales, "encode")
        scales.clamp_(max=_MAX_SCALE)
        out[: scales.nbytes].copy_(scales.view(-1).view(torch.uint8))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        if not out.numel():
            return
        scales = torch.empty(_block_count(out.numel()), 1, dtype=torch.float32)
        scales.view(-1).view(torch.uint8).copy_(data[: scales.nbytes])
        quantized = data[scales.nbytes :].view(torch.int8)
        require_finite(scales, "decode")
        low, high = (float(bound) for bound in scales.aminmax())
        if low < _MIN_SCALE or high > _MAX_SCALE:
            raise CodecError(
                f"int8 scales from {low:g} to {high:g} where an encoder writes "
                f"{_MIN_SCALE:g} to {_MAX_SCALE:g}: drop this sender"
            )
        if int(quantized.amin()) < -_INT8_MAX:
            raise CodecError("int8 value -128, which no encoder writes: drop this sender")
        for chunk, blocks, shape in _block_chunks(out.numel()):
            out[chunk].copy_(quantized[chunk])
            out[chunk].view(shape).mul_(scales[blocks])


CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in (NoneCodec(), Fp16Codec(), Int8Codec())})
"""Every codec by its name in `outer.codec`."""


def get_codec(name: str) -> Codec:
    """The codec of that name; SettingsError lists the known ones when there is none."""
    if name not in CODECS:
        raise SettingsError(f"outer.codec is {name!r}: use one of {', '.join(CODECS)}")
    return CODECS[name]


def accumulate(codec: Codec, data: Tensor, *, weight: float, accumulator: Tensor, scratch: Tensor) -> None:
    """accumulator += weight * decode(data): a multiplication, then an addition, each rounded to fp32.

    Args:
        data: uint8 [wire_bytes(n)] from a peer that need not be trusted.
        weight: rounded to fp32 before use.
        accumulator: fp32 [n]; unchanged when this raises.
        scratch: fp32 [>= n]; its first n values are overwritten.

    Raises:
        CodecError: as `Codec.decode`.
        ValueError: scratch is too small, or a tensor of the wrong type or place.
    """
    _require(accumulator, torch.float32, "accumulator")
    if scratch.numel() < accumulator.numel():
        raise ValueError(f"scratch holds {scratch.numel()} values: {accumulator.numel()} are needed")
    decoded = scratch[: accumulator.numel()]
    codec.decode(data, decoded)
    rounded = float(torch.tensor(weight, dtype=torch.float32))
    for chunk in _chunks(accumulator.numel()):
        accumulator[chunk].add_(decoded[chunk].mul_(rounded))


def _chunks(numel: int) -> Iterator[slice]:
    """Ranges of values that fit into a core's cache together."""
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))


def _block_chunks(numel: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """(range of values, range of blocks, shape [blocks, values in each]); a short last block comes alone."""
    whole = numel - numel % BLOCK
    for chunk in _chunks(whole):
        blocks = slice(chunk.start // BLOCK, chunk.stop // BLOCK)
        yield chunk, blocks, (blocks.stop - blocks.start, BLOCK)
    if whole < numel:
        yield slice(whole, numel), slice(whole // BLOCK, whole // BLOCK + 1), (1, numel - whole)


def _block_count(numel: int) -> int:
    return -(-numel // BLOCK)


def _bytes_of(data: Tensor, chunk: slice, width: int) -> Tensor:
    return data[chunk.start * width : chunk.stop * width]


def _require(tensor: Tensor, dtype: torch.dtype, name: str, *, device: torch.device = _HOST) -> None:
    fits = tensor.dtype == dtype and tensor.dim() == 1 and tensor.is_contiguous()
    if not fits or tensor.device != device:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
            f"it must be {dtype}, one-dimensional, contiguous and on {device}"
        )


def require_finite(values: Tensor, action: str = "average") -> None:
    """Raise NonFiniteError if a value is NaN or infinite; one pass."""
    if not values.numel():
        return
    low, high = (float(bound) for bound in values.aminmax())  # aminmax hands NaN on, and NaN fails `<`
    if not (-torch.inf < low and high < torch.inf):
        raise NonFiniteError(f"cannot {action} NaN or infinity: a replica diverged or its bytes are damaged")
