"""Text that a model writes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from opendiloco.pretrained import context_tokens
from opendiloco.tokenizer import Tokenizer


def generate_text(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Continue a prompt: the new text alone. Ends early where the model ends the document.

    Temperature 0 takes the likeliest token each time; above it, `seed` decides. The model sees at most its
    own context: when that is full, the older half is dropped.
    """
    limit = context_tokens(model.config) or 2**20
    device = next(model.parameters()).device
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_id]
    context, new = prompt_ids, list[int]()
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        while len(new) < max_new_tokens and tokenizer.end_id not in new:
            if len(context) >= limit:
                context = context[-max(1, limit // 2) :]
            count = min(max_new_tokens - len(new), max(1, limit - len(context)))
            chunk = _generate(model, context, count=count, temperature=temperature, end_id=tokenizer.end_id)
            new += chunk
            context = context + chunk
    model.train(was_training)
    return tokenizer.decode(new)


def _generate(model: PreTrainedModel, context: list[int], *, count: int, temperature: float, end_id: int) -> list[int]:
    """At most `count` ids that follow the context; `end_id` comes last, if at all."""
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0}
    settings = GenerationConfig(
        max_new_tokens=count,
        eos_token_id=end_id,
        pad_token_id=end_id,
        use_cache=True,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    ids = torch.tensor([context], device=next(model.parameters()).device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    new: list[int] = output[0, len(context) :].tolist()
    return new
