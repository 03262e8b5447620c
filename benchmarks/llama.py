"""A small Llama of bytes, with RoPE, RMSNorm and SwiGLU: plain PyTorch is up seconds before transformers is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
"""Tokens are bytes."""
HEAD = 32
INIT_STD = 0.02


class Llama(nn.Module):
    """Tokens [batch, T] in, the mean loss of predicting each from those before it out. Embeddings are tied."""

    def __init__(self, *, hidden: int, layers: int, seq_len: int) -> None:
        """The same parameters whenever it is called."""
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)
        angles = torch.outer(torch.arange(seq_len), 10_000.0 ** -torch.arange(0, 1, 2 / HEAD))
        self.turns: Tensor
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden, self.turns[:, : hidden.shape[1]])
        logits = functional.linear(self.norm(hidden), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Layer(nn.Module):
    """Attention and a gated MLP of three times the size, each on top of what came in."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attended = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        heads = self.query_key_value(self.before_attention(hidden)).unflatten(
            -1, (3, -1, HEAD)
        )  # [B, T, 3, heads, HEAD]
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(rotate(query, turns), rotate(key, turns), value, is_causal=True)
        hidden = hidden + self.attended(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(hidden)).chunk(2, dim=-1)
        result: Tensor = hidden + self.down(functional.silu(gate) * up)
        return result


def rotate(values: Tensor, turns: Tensor) -> Tensor:
    """RoPE, arXiv:2104.09864. Args: values [B, heads, T, HEAD]; turns [2, T, HEAD / 2], cosines and sines."""
    cos, sin = turns
    left, right = values.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
