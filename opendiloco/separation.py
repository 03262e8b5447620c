"""Documents that share a sequence, kept apart: positions restart, attention stays inside, the boundary is no target.

Positions are all that a model is told. transformers makes the mask out of them: where no mask and no cache is given,
positions that do not go on mean another document (`find_packed_sequence_indices`), whatever the attention's
implementation and together with a model's own sliding windows. Models that do not do so are found out by trying.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from opendiloco.errors import SettingsError

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, that is taken for rounding."""

_NO_TARGET = -100


def positions(tokens: Tensor, end_id: int) -> Tensor:
    """The place of each token in its document: int64 [batch, seq_len], on the tokens' device.

    Args:
        tokens: int64 [batch, seq_len]; `end_id` is the last token of a document.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = places[:, 1:] * (tokens[:, :-1] == end_id)
    return places - starts.cummax(dim=1).values


def has_target(tokens: Tensor, end_id: int | None) -> Tensor:
    """Whether the next token is to be predicted: bool [batch, seq_len - 1].

    All are; with an `end_id` not the first token of a document, which nothing in that document says anything about.
    """
    inputs = tokens[:, :-1]
    return torch.ones_like(inputs, dtype=torch.bool) if end_id is None else inputs != end_id


def separated_loss(model: nn.Module, tokens: Tensor, end_id: int) -> Tensor:
    """Mean cross entropy (nats) of the next tokens that are targets, fp32 scalar; see `model.causal_lm_loss`."""
    logits = model(input_ids=tokens, position_ids=positions(tokens, end_id), use_cache=False).logits[:, :-1]
    wanted = has_target(tokens, end_id)
    targets = tokens[:, 1:].masked_fill(~wanted, _NO_TARGET)
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_NO_TARGET, reduction="sum"
    )
    return total / wanted.sum().clamp(min=1)


@torch.no_grad()
def check_separation(model: nn.Module, end_id: int, *, name: str) -> None:
    """Find out with one small forward pass whether `model` keeps documents apart.

    Args:
        name: model.name.
    Raises:
        SettingsError: what stands in one document changes what the model says about the next one.
    """
    device, training = next(model.parameters()).device, model.training
    words = [1 if end_id == 0 else 0, 3 if end_id == 2 else 2, 5 if end_id == 4 else 4]
    first, second = [words[i % 3] for i in range(7)] + [end_id], [words[-(i * i) % 3] for i in range(6)]
    packed = torch.tensor([[*first, *second]], device=device)
    model.eval()
    try:
        together = model(input_ids=packed, position_ids=positions(packed, end_id), use_cache=False).logits
        alone = model(input_ids=packed[:, len(first) :], use_cache=False).logits
    except TypeError:  # takes no positions
        is_apart = False
    else:
        difference = (together[:, len(first) :] - alone).abs().max()
        is_apart = bool(difference <= TOLERANCE * alone.abs().max())
    finally:
        model.train(training)
    if not is_apart:
        raise SettingsError(
            f"data.separate_documents is true, but model.name {name} lets each document see the one before it: set "
            "data.separate_documents to false, or use another model"
        )
