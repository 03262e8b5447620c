"""The outer state (theta, momentum, round, lineage) and the outer step that moves it, alike on every machine.

Replicas stay identical because the outer step is a fixed sequence of single IEEE fp32 operations, each
rounded by itself: a multiplication, then an addition. Nothing here may be fused or reassociated (`alpha=`,
addcmul, lerp, foreach optimizers), or a laptop and a server with other vector units part ways.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat
from operator import mul
from typing import assert_never

import torch
from blake3 import blake3
from torch import Tensor

from opendiloco.config import OuterConfig
from opendiloco.ledger import Reading

CHUNK = 1 << 18
"""Values the outer step works on at a time: 1 MiB of fp32."""


@dataclass(slots=True, eq=False)
class OuterState:
    """What all participants agree on bit for bit after a round.

    The tensors are used as given, never copied or replaced, so they may lie in shared memory. They are
    fp32, one-dimensional, contiguous and on one device.

    Raises:
        ValueError: tensors of the wrong type, place or size.
    """

    theta: Tensor
    """fp32 [N]: outer parameters after `round` rounds."""
    momentum: Tensor
    """fp32 [N]: outer momentum (adam: first moment); zeros at the start."""
    second_moment: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    """fp32 [N] with outer adam, zeros at the start; empty otherwise."""
    round: int = 0
    """Rounds committed."""
    lineage: str = ""
    """Hex digest of the rounds committed so far; see `genesis_lineage`."""

    def __post_init__(self) -> None:
        _require_like(self.theta, self.momentum, "momentum")
        if self.second_moment.numel():
            _require_like(self.theta, self.second_moment, "second_moment")

    @classmethod
    def start(cls, theta: Tensor, config: OuterConfig, *, contract_digest: str) -> OuterState:
        """The state before round 1: `theta` itself (fp32 [N] on the host, not copied) and zeros."""
        second_size = theta.numel() if config.optimizer == "adam" else 0
        state = cls(theta, torch.zeros_like(theta), theta.new_zeros(second_size))
        state.lineage = genesis_lineage(contract_digest, params_hash(state))
        return state


@torch.no_grad()
def outer_step(state: OuterState, average: Tensor, config: OuterConfig, *, chunk_numel: int = CHUNK) -> None:
    """Apply one round's outer gradient in place and count the round (DiLoCo, Algorithm 1, arXiv:2311.08105).

    `state.round` grows by one; `state.lineage` is the caller's to set, with `next_lineage`. All optimizers
    are elementwise: a slice of the state may be stepped on its own with the same slice of the average.

    Args:
        state: theta_t in, theta_{t+1} out.
        average: fp32 [N] on theta's device: weighted mean of theta_t - theta_i; only read.
        config: optimizer, lr, momentum, beta2, eps; every scalar is rounded to fp32 first.
        chunk_numel: values per chunk (size of the scratch); the result does not depend on it.

    Raises:
        ValueError: sizes or types differ, or outer adam without a second moment.
    """
    _require_like(state.theta, average, "average")
    if config.optimizer == "adam" and state.second_moment.numel() != state.theta.numel():
        raise ValueError("outer.optimizer is adam and the state has no second moment: start it for adam")
    if chunk_numel < 1:
        raise ValueError(f"chunk_numel is {chunk_numel}: it must be at least 1")
    size = min(chunk_numel, state.theta.numel())
    scratch = torch.empty_like(average[:size])
    step = state.round + 1
    for chunk in _chunks(state.theta.numel(), chunk_numel):
        theta, m, g = state.theta[chunk], state.momentum[chunk], average[chunk]
        work = scratch[: g.numel()]
        match config.optimizer:
            case "nesterov":
                _nesterov(theta, m, g, config=config, work=work)
            case "sgd":
                theta.sub_(torch.mul(g, _fp32(config.lr), out=work))
            case "sgdm":
                m.mul_(_fp32(config.momentum)).add_(g)
                theta.sub_(torch.mul(m, _fp32(config.lr), out=work))
            case "adam":
                _adam(theta, m, state.second_moment[chunk], g, config=config, step=step, work=work)
            case _ as never:
                assert_never(never)
    state.round = step


def params_hash(state: OuterState) -> str:
    """Hex BLAKE3 over theta, momentum and (outer adam) second moment as flat little-endian fp32 bytes.

    Reads the host tensors in place. This is the hash in each round line that proves replicas identical.
    """
    # A pool of its own: threads of blake3's global pool (AUTO) do not survive a fork, and hashing then hangs.
    hasher = blake3(max_threads=torch.get_num_threads())
    for tensor in (state.theta, state.momentum, state.second_moment):
        hasher.update(tensor.detach().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def genesis_lineage(contract_digest: str, params_hash: str) -> str:
    """Hex lineage of a run before its first round: its contract and its initial outer state."""
    return _digest(b"opendiloco genesis", contract_digest.encode(), params_hash.encode())


def next_lineage(
    lineage: str,
    *,
    round: int,
    weights: Mapping[str, float],
    tokens: Mapping[str, int],
    readings: Mapping[str, Sequence[Reading]],
    average_digest: str,
) -> str:
    """Hex lineage after committing `round` on top of `lineage`.

    Args:
        lineage: the one before.
        round: number of the round committed, >= 1.
        weights: weight of each participant by peer; the order of the mapping does not matter.
        tokens: what each participant trained on in the round.
        readings: how far each participant has read the text.
        average_digest: digest of the averaged bytes as they travelled.

    Raises:
        ValueError: no participants, a weight that is not positive and finite, tokens or readings of others, or a
            round below 1.
    """
    if round < 1:
        raise ValueError(f"round is {round}: the first round that can be committed is 1")
    if not weights:
        raise ValueError(f"round {round} has no participants: there is nothing to commit")
    if not tokens.keys() == readings.keys() == weights.keys():
        others = sorted(tokens.keys() ^ weights.keys() | readings.keys() ^ weights.keys())
        raise ValueError(f"round {round}: weights, tokens and readings are not of the same peers ({others})")
    fields = [lineage.encode(), struct.pack("<Q", round), average_digest.encode()]
    for peer, weight in sorted(weights.items()):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight of {peer} is {weight}: weights are positive and finite")
        read = b"".join(reading.pack() for reading in readings[peer])
        fields += [peer.encode(), struct.pack("<dQ", weight, tokens[peer]), read]
    return _digest(b"opendiloco round", *fields)


def _nesterov(theta: Tensor, m: Tensor, g: Tensor, *, config: OuterConfig, work: Tensor) -> None:
    """m = mu m + g; theta -= lr (g + mu m), as torch.optim.SGD(nesterov=True)."""
    mu = _fp32(config.momentum)
    m.mul_(mu).add_(g)
    torch.mul(m, mu, out=work).add_(g).mul_(_fp32(config.lr))
    theta.sub_(work)


def _adam(theta: Tensor, m: Tensor, v: Tensor, g: Tensor, *, config: OuterConfig, step: int, work: Tensor) -> None:
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g g; theta -= lr m' / (sqrt(v') + eps), ' bias-corrected.

    torch.sqrt of fp32 is off by one unit in the last place for some values on some machines. The root of
    the same value in fp64, rounded to fp32, is the correctly rounded one wherever fp64 roots are good to
    3 units: a root of an fp32 number is never nearer than 2**-50 to the midpoint of two fp32 numbers.
    """
    b1, b2 = config.momentum, config.beta2
    m.mul_(_fp32(b1)).add_(torch.mul(g, _fp32(1 - b1), out=work))
    torch.mul(g, g, out=work)
    v.mul_(_fp32(b2)).add_(work.mul_(_fp32(1 - b2)))
    torch.mul(v, _fp32(1 / (1 - _power(b2, step))), out=work)
    work.copy_(work.to(torch.float64).sqrt_()).add_(_fp32(config.eps))
    torch.div(m, work, out=work)
    theta.sub_(work.mul_(_fp32(config.lr / (1 - _power(b1, step)))))


def _power(base: float, exponent: int) -> float:
    """Repeated fp64 multiplication: `**` is the C library's, and libraries differ in the last place."""
    return reduce(mul, repeat(base, exponent), 1.0)


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _chunks(numel: int, chunk_numel: int) -> Iterator[slice]:
    for start in range(0, numel, chunk_numel):
        yield slice(start, min(start + chunk_numel, numel))


def _digest(*fields: bytes) -> str:
    """Hex BLAKE3 of fields, each behind its length, so that no two lists of fields read the same."""
    hasher = blake3()
    for part in fields:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.hexdigest()


def _require_like(theta: Tensor, tensor: Tensor, name: str) -> None:
    for each, label in ((theta, "theta"), (tensor, name)):
        if each.dtype != torch.float32 or each.dim() != 1 or not each.is_contiguous():
            raise ValueError(
                f"{label} is {each.dtype} {list(each.shape)}: it must be fp32, one-dimensional, contiguous"
            )
    if theta.numel() != tensor.numel() or theta.device != tensor.device:
        raise ValueError(
            f"{name} has {tensor.numel()} values on {tensor.device}, theta {theta.numel()} on "
            f"{theta.device}: they must match"
        )
