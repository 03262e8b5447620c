"""The loss that all workers of a run minimize."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from opendiloco.separation import separated_loss


def causal_lm_loss(model: nn.Module, tokens: Tensor, *, end_id: int | None = None) -> Tensor:
    """Mean cross entropy (nats) of each next token, fp32 scalar.

    Args:
        tokens: int64 [batch, seq_len] on the model's device; all of it text, no padding. The targets are
            tokens 1 to seq_len - 1 of each sequence.
        end_id: last token of each document, where documents are to be kept apart; their first tokens are no targets.
    """
    if end_id is not None:
        return separated_loss(model, tokens, end_id)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]  # [batch, seq_len - 1, vocab]
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
