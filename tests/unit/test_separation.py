"""Claims about documents that share a sequence: what one says depends on itself alone, or the model is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from opendiloco.config import ComputeConfig, Contract, DataConfig, InnerConfig, ModelConfig, RunConfig
from opendiloco.errors import SettingsError
from opendiloco.evaluate import validation_loss
from opendiloco.inner import InnerSteps
from opendiloco.loss import causal_lm_loss
from opendiloco.model import build_model
from opendiloco.separation import check_separation, has_target, positions, separated_loss
from opendiloco.simulate import simulate

VOCAB, END, SEQ_LEN = 64, 63, 24
ENDS = ([5, 6, 17], [0, 11], [23], [], [3, 9, 15, 22])  # where documents end in each sequence
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@pytest.fixture
def tokens() -> Tensor:
    """Sequences with documents of many lengths, one token, none and all of the sequence among them."""
    rows = torch.randint(0, END, (len(ENDS), SEQ_LEN), generator=torch.Generator().manual_seed(0))
    for row, ends in zip(rows, ENDS, strict=True):
        row[ends] = END
    return rows


def documents(row: Tensor) -> list[Tensor]:
    """Those of a sequence, each with its end."""
    cuts = [0, *(int(place) + 1 for place in (row == END).nonzero()), len(row)]
    return [row[start:end] for start, end in pairwise(cuts) if start < end]


def tiny(name: str) -> nn.Module:
    if name == "preset":
        return build_model(ModelConfig(), vocab_size=VOCAB, seq_len=SEQ_LEN, seed=0)
    config: PretrainedConfig = {
        "eager preset": lambda: build_model(ModelConfig(), vocab_size=VOCAB, seq_len=SEQ_LEN, seed=0).config,
        "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4),
        "mistral": lambda: MistralConfig(**SMALL, sliding_window=4),
        "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8),
        "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        "mamba": lambda: MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
    }[name]()
    torch.manual_seed(0)
    attention = {"attn_implementation": "eager"} if name == "eager preset" else {}
    model: nn.Module = AutoModelForCausalLM.from_config(config, **attention)
    return model.train()


@pytest.mark.parametrize("name", ["preset", "eager preset", "gpt2", "mistral", "qwen3"])
@torch.no_grad()
def test_a_document_in_a_packed_sequence_has_the_logits_of_the_document_alone(name: str, tokens: Tensor) -> None:
    model = tiny(name).eval()
    packed = model(input_ids=tokens, position_ids=positions(tokens, END), use_cache=False).logits
    for row, logits in zip(tokens, packed, strict=True):
        alone = [model(input_ids=document[None], use_cache=False).logits[0] for document in documents(row)]
        torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-4, atol=1e-5)
    check_separation(model, END, name=name)


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_a_model_that_cannot_keep_documents_apart_is_refused_in_one_line(name: str) -> None:
    model = tiny(name)
    with pytest.raises(SettingsError, match=rf"separate_documents is true, but model\.name {name} lets each") as caught:
        check_separation(model, END, name=name)
    assert "\n" not in str(caught.value)
    assert model.training


@pytest.mark.parametrize("end_id", [0, 1, 2, 3, 4, 5, END])
def test_the_check_works_with_any_end_and_leaves_the_model_in_its_mode(end_id: int) -> None:
    model = tiny("preset")
    check_separation(model, end_id, name="tiny")
    assert model.training


def test_the_first_token_of_a_document_is_no_target_and_the_loss_is_the_mean_over_the_others(tokens: Tensor) -> None:
    model = tiny("preset").eval()
    losses = []
    for row in tokens:
        for document in documents(row):
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            losses.append(functional.cross_entropy(logits, document[1:], reduction="none"))
    expected = torch.cat(losses)
    assert (
        len(expected) == int(has_target(tokens, END).sum()) == tokens.numel() - sum(len(documents(r)) for r in tokens)
    )
    torch.testing.assert_close(causal_lm_loss(model, tokens, end_id=END), expected.mean(), rtol=1e-5, atol=1e-6)
    loss, count = validation_loss(model, [tokens[:2], tokens[2:]], end_id=END)
    assert (loss, count) == (pytest.approx(float(expected.mean().detach()), rel=1e-5), len(expected))


def test_batches_without_any_target_have_a_loss_of_zero() -> None:
    model = tiny("preset")
    ends = torch.full((2, 4), END)
    loss = causal_lm_loss(model, ends, end_id=END)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    assert validation_loss(model, [ends], end_id=END) == (0.0, 0)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_micro_batches_give_the_gradient_of_the_whole_batch(tokens: Tensor, micro_batch_size: int) -> None:
    results = []
    for size in (0, micro_batch_size):
        model = tiny("preset")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        compute = ComputeConfig(micro_batch_size=size)
        steps = InnerSteps(model, InnerConfig(clip_norm=0.0), compute, end_id=END)
        result = steps.step(optimizer, tokens, lr=1.0)
        results.append((result.loss, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def test_a_worker_trains_and_validates_with_documents_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.txt").write_text("".join(f"line number {i}\n" for i in range(300)))
    data = DataConfig(source=f"text:{tmp_path}/lines.txt", seq_len=512, separate_documents=True, validation_sequences=2)
    contract = Contract(data=data, run=RunConfig(rounds=1), inner=InnerConfig(steps=3, batch_size=1, warmup_steps=1))
    training = list[bool]()

    def recorded(model: nn.Module, tokens: Tensor, end_id: int) -> Tensor:
        training.append(torch.is_grad_enabled())
        assert end_id == 256
        return separated_loss(model, tokens, end_id)

    monkeypatch.setattr("opendiloco.loss.separated_loss", recorded)
    simulate(contract, ComputeConfig(), ["worker"], tmp_path)
    assert training == [False, True, True, True, False]  # validation, inner steps, validation
