"""Presets: models of the papers' sizes, and initial parameters that are the same bits on every machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaConfig

INIT_STD = 0.02
"""Standard deviation of the initial matrices of a preset."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model; the names are those of transformers.LlamaConfig."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = True


PRESETS = {
    # 0.98M parameters with the vocabulary of bytes: trains on a laptop's CPU.
    "tiny": Shape(4, 128, 448, 4, 4, 32),
    "14m": Shape(8, 256, 640, 4, 4, 64),
    # DiLoCo, arXiv:2311.08105: layers, d, heads, K/V size. The gated MLP has 8/3 d instead of 4 d (same number
    # of parameters). Tied embeddings, and heads of 128 at 400m, give the sizes of the paper's names.
    "60m": Shape(3, 896, 2432, 16, 16, 64),
    "150m": Shape(12, 896, 2432, 16, 16, 64),
    "400m": Shape(12, 1536, 4096, 12, 12, 128),
    # OpenDiLoCo, arXiv:2407.07852: the shape of TinyLlama.
    "1b": Shape(22, 2048, 5632, 32, 4, 64, tie_word_embeddings=False),
}
"""Parameter counts in the names hold for a vocabulary of 32,000."""


def preset_config(name: str, *, vocab_size: int, seq_len: int) -> LlamaConfig:
    """The configuration of a preset: names as in `PRESETS`."""
    from transformers import LlamaConfig  # slow to import, and the names are known without it

    return LlamaConfig(
        **asdict(PRESETS[name]),
        vocab_size=vocab_size,
        max_position_embeddings=seq_len,
        initializer_range=INIT_STD,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Matrices: mean 0, deviation INIT_STD; vectors (norms): 1."""
    generator = np.random.PCG64(seed)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
        else:
            fill_normal(parameter, generator, std=INIT_STD)


@torch.no_grad()
def fill_normal(parameter: Tensor, generator: np.random.PCG64, *, std: float) -> None:
    """Nearly normal values, mean 0, the same bits on every machine.

    torch's normal_ gives other last bits on CPUs with other vector units. The sum of four 16-bit numbers
    is near enough to a normal distribution (ends at 3.5 deviations) and the same bits everywhere.
    """
    scale = std / np.sqrt(4 * (2.0**32 - 1) / 12)  # variance of one 16-bit number: (2**32 - 1) / 12
    words = generator.random_raw(parameter.numel()).astype("<u8").view("<u2").reshape(-1, 4)
    sums = words.sum(axis=1, dtype=np.int64) - 2 * (2**16 - 1)
    parameter.copy_(torch.from_numpy((sums * scale).astype(np.float32)).view_as(parameter))
