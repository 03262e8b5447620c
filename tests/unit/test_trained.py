"""Models that start from weights, frozen parameters and LoRA adapters: what is trained, what travels, what is saved."""

from __future__ import annotations

import argparse
import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from opendiloco.config import ComputeConfig, Contract, InnerConfig, ModelConfig
from opendiloco.errors import SettingsError
from opendiloco.flat import FlatLayout, replica_digest, trainable_parameters
from opendiloco.generation import generate_text
from opendiloco.inner import InnerSteps
from opendiloco.model import build_model, check_model, count_parameters, describe_size, load_model, save_model
from opendiloco.optimizers import make_inner_optimizer
from opendiloco.precheck import check_replica
from opendiloco.presets import fill_normal
from opendiloco.settings import load_settings
from opendiloco.simulate import simulate
from opendiloco.tokenizer import ByteTokenizer
from opendiloco.trained import choose_trained, merged_copy
from opendiloco.trainer import run_worker
from opendiloco.worker import Worker

BYTES = ByteTokenizer()
VOCAB = BYTES.vocab_size


def build(seed: int = 0, **settings: Any) -> Any:
    return build_model(ModelConfig(**settings), vocab_size=VOCAB, seq_len=32, seed=seed)


def small_llama(folder: Path, *, seed: int = 0, weights: bool = True, **changes: Any) -> Path:
    """A folder with a model of 16 values a token."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    config = LlamaConfig(**{**sizes, **changes})
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            LlamaForCausalLM(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def values(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(0))


def train(model: Any, steps: int = 2) -> None:
    optimizer = make_inner_optimizer(model, InnerConfig(lr=0.01))
    inner = InnerSteps(model, InnerConfig(), ComputeConfig())
    for _ in range(steps):
        inner.step(optimizer, tokens(), lr=0.01)


def run(model: dict[str, Any], out: Path, *, rounds: int = 2) -> list[Worker]:
    contract = Contract.model_validate(
        {
            "run": {"id": "trained", "rounds": rounds},
            "model": model,
            "data": {"source": f"text:{argparse.__file__}", "seq_len": 16, "validation_sequences": 2},
            "inner": {"lr": 1e-2, "warmup_steps": 0, "batch_size": 2, "steps": 2},
        }
    )
    return simulate(contract, ComputeConfig(device="cpu", threads=1), ["a", "b"], out)


# --- what the parameters start from --------------------------------------------------------------------


def test_a_preset_goes_on_from_the_weights_of_an_earlier_run(tmp_path: Path) -> None:
    trained = build()
    train(trained)
    save_model(trained, BYTES, tmp_path / "model")
    settings = {"name": "tiny", "start": str(tmp_path / "model")}
    check_model(ModelConfig(**settings), vocab_size=VOCAB, seq_len=64)
    assert same(values(build(seed=5, **settings)), values(trained))
    assert not same(values(build()), values(trained))


def test_an_hf_model_starts_from_its_weights_or_from_seeded_values(tmp_path: Path) -> None:
    folder = small_llama(tmp_path / "one")
    name = f"hf:{folder}"
    own = values(LlamaForCausalLM.from_pretrained(folder))
    assert same(values(build(name=name)), own)
    first, again, other = (values(build(seed=seed, name=name, start="random")) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, own)
    assert not same(first, other)
    elsewhere = small_llama(tmp_path / "two", seed=9)
    assert same(values(build(name=name, start=str(elsewhere))), values(LlamaForCausalLM.from_pretrained(elsewhere)))
    assert build(name=name).config._attn_implementation == "sdpa"


def test_weights_that_do_not_fit_name_the_first_parameter_that_does_not(tmp_path: Path) -> None:
    name = f"hf:{small_llama(tmp_path / 'model', weights=False)}"
    norm, head = "model.layers.2.self_attn.q_proj.weight", "lm_head.weight"
    for number, (changes, line) in enumerate(
        [
            (
                {"vocab_size": 300},
                r"whose parameter model.embed_tokens.weight is \[300, 16\], but .* it is \[257, 16\]",
            ),
            ({"num_hidden_layers": 1}, "which has no parameter model.layers.1.self_attn.q_proj.weight of model.name"),
            ({"num_hidden_layers": 3}, f"whose parameter {norm} model.name .* does not have"),
            ({"tie_word_embeddings": False}, f"whose parameter {head} model.name .* does not have"),
            (
                {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4},
                "whose num_attention_heads is 4, but",
            ),
        ]
    ):
        start = str(small_llama(tmp_path / str(number), **changes))
        settings = ModelConfig(name=name, start=start)
        for check in (build_model, check_model):
            seed = {"seed": 0} if check is build_model else {}
            with pytest.raises(SettingsError, match=line) as caught:
                check(settings, vocab_size=VOCAB, seq_len=32, **seed)
            assert "\n" not in str(caught.value)


def test_a_start_without_weights_is_one_line(tmp_path: Path) -> None:
    empty = small_llama(tmp_path / "empty", weights=False)
    for start, line in [
        (str(empty), "holds no weights: name a folder that training wrote"),
        (f"{tmp_path}/none", "model.start is .*/none, but there is no such folder: correct the path"),
    ]:
        with pytest.raises(SettingsError, match=line):
            build(start=start)


# --- frozen parameters ---------------------------------------------------------------------------------


def test_frozen_parameters_keep_their_bits_through_rounds_and_do_not_travel(tmp_path: Path) -> None:
    patterns = ["model.embed_tokens.*", "model.layers.[01].mlp.*", "*.input_layernorm.weight"]
    before = values(build(frozen=patterns))
    workers = run({"frozen": patterns}, tmp_path)
    for worker in workers:
        after = values(worker.model)
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        kept = {name for name in after if name not in moved}
        assert kept == {
            name
            for name in after
            if "embed_tokens" in name or "layers.0.mlp" in name or "layers.1.mlp" in name or "input_layernorm" in name
        }
        assert {entry.name for entry in FlatLayout.of(worker.model).entries} == moved
        assert worker.optimizer.outer.theta.numel() == sum(after[name].numel() for name in moved)
    assert len({worker.optimizer.params_hash for worker in workers}) == 1
    assert describe_size(build()) == "0.98 M parameters"
    assert describe_size(workers[0].model) == "0.98 M parameters, 0.607 M of them trained"


def test_any_name_of_a_tied_parameter_freezes_it() -> None:
    model = build(frozen=["lm_head.weight"])
    assert not model.model.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    ("frozen", "line"),
    [
        (
            ["model.embed.weight"],
            "'model.embed.weight', which is no parameter: there are model.embed_tokens.weight, ",
        ),
        (["*"], r"model.frozen is \['\*'\], which leaves nothing to train: freeze less"),
    ],
)
def test_patterns_that_fit_nothing_or_everything_are_one_line(frozen: list[str], line: str) -> None:
    with pytest.raises(SettingsError, match=line.replace("?", r"\?")):
        build(frozen=frozen)
    with pytest.raises(SettingsError, match=line.replace("?", r"\?")):
        check_model(ModelConfig(frozen=tuple(frozen)), vocab_size=VOCAB, seq_len=32)


def test_replicas_with_other_frozen_values_are_told_apart() -> None:
    one, same_one, other = build(frozen=["*.mlp.*"]), build(frozen=["*.mlp.*"]), build(frozen=["*.mlp.*"])
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[7, 7] += 1e-7
        same_one.model.norm.weight.zero_()  # trained: the hash of theta is there for that
    assert replica_digest(one) == replica_digest(same_one) != replica_digest(other)
    assert replica_digest(build()) == FlatLayout.of(build()).digest


# --- adapters ------------------------------------------------------------------------------------------


def test_only_adapters_are_trained_and_the_model_under_them_keeps_its_bits(tmp_path: Path) -> None:
    before = values(build(lora_rank=2))
    workers = run({"lora_rank": 2, "lora_targets": ["q_proj", "down_proj"]}, tmp_path)
    adapters = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{letter}.default.weight"
        for layer in range(4)
        for name in ("self_attn.q_proj", "mlp.down_proj")
        for letter in "AB"
    }
    for worker in workers:
        after = values(worker.model)
        assert {entry.name for entry in FlatLayout.of(worker.model).entries} == adapters
        assert worker.optimizer.outer.theta.numel() == 4 * 2 * (128 + 128 + 448 + 128)
        assert all(torch.equal(after[name], before[name]) for name in before if ".lora_" not in name and name in after)
        assert any(after[name].any() for name in adapters if ".lora_B." in name)
    assert len({worker.optimizer.params_hash for worker in workers}) == 1


def test_adapters_start_equal_everywhere_and_change_nothing_at_first() -> None:
    plain = build()
    torch.manual_seed(3)
    first = build(lora_rank=4)
    torch.manual_seed(4)
    again, other = build(lora_rank=4), build(seed=1, lora_rank=4)
    first_values, again_values, other_values = (
        [parameter.detach().clone() for parameter in trainable_parameters(model)] for model in (first, again, other)
    )
    assert all(map(torch.equal, first_values, again_values))
    assert not all(map(torch.equal, first_values, other_values))
    expected = torch.empty(4, 128)
    fill_normal(expected, np.random.PCG64(0), std=(1 / (3 * 128)) ** 0.5)
    assert torch.equal(first_values[0], expected)  # torch's own generator has no part in it
    assert len(first_values) == 4 * 7 * 2  # A and B beside each linear layer of each of 4 blocks, not the head
    torch.testing.assert_close(first.eval()(tokens()).logits, plain.eval()(tokens()).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_a_saved_model_with_adapters_is_an_ordinary_one_and_the_adapters_lie_beside_it(tmp_path: Path) -> None:
    model = build(lora_rank=4)
    train(model)
    folder = tmp_path / "model"
    save_model(model, BYTES, folder)
    expected = model.eval()(tokens()).logits
    loaded, tokenizer = load_model(folder)
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert count_parameters(model) == count_parameters(loaded)
    torch.testing.assert_close(loaded(tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits, loaded(tokens()).logits)
    again = PeftModel.from_pretrained(build(), folder / "adapter").eval()
    torch.testing.assert_close(again(tokens()).logits, expected)
    assert generate_text(loaded, tokenizer, "a", max_new_tokens=3, temperature=0, seed=0) is not None
    train(model, 1)  # and it trains on


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lora_targets": ["q_prj"]}, "model.lora_targets has 'q_prj', which is no layer: there are q_proj, "),
        ({"lora_targets": ["embed_tokens"]}, "'embed_tokens', which is no layer: there are"),
    ],
)
def test_targets_that_are_no_layers_are_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError, match=line.replace("?", r"\?")):
        build(lora_rank=2, **settings)


@pytest.mark.parametrize(("targets", "count"), [(("c_attn",), 1), ((), 4)])
def test_gpt2s_layers_get_adapters(targets: tuple[str, ...], count: int) -> None:
    """transformers' Conv1D is a linear layer that keeps its weight the other way round."""
    config = GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=32)
    model = choose_trained(GPT2LMHeadModel(config), ModelConfig(lora_rank=2, lora_targets=targets), seed=0)
    assert len(trainable_parameters(model)) == 2 * count
    before = model.eval()(tokens()).logits
    train(model.train())
    trained = model.eval()(tokens()).logits
    assert not torch.allclose(trained, before)
    torch.testing.assert_close(merged_copy(model)(tokens()).logits, trained, rtol=1e-4, atol=1e-5)


def test_adapters_without_peft_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_peft(name: str, *rest: Any, **others: Any) -> Any:
        if name.split(".")[0] == "peft":
            raise ImportError(name)
        return real(name, *rest, **others)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(
        SettingsError, match=r"^model.lora_rank is 2, which needs peft: \S+/bin/pip install peft, or set"
    ):
        build(lora_rank=2)


# --- before the network is joined ----------------------------------------------------------------------


def test_what_is_wrong_with_a_model_is_found_without_its_weights(tmp_path: Path) -> None:
    folder = small_llama(tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")  # nobody reads it
    small = small_llama(tmp_path / "small", weights=False, vocab_size=100)
    other = small_llama(tmp_path / "other", vocab_size=600)
    (tmp_path / "empty").mkdir()
    for changes, line in [
        ({"model": {"name": "7b"}}, "^model.name is '7b': use tiny,"),
        ({"model": {"name": f"hf:{tmp_path}/empty"}}, "holds no model"),
        ({"model": {"name": f"hf:{tmp_path}/none"}}, "there is no such folder"),
        ({"model": {"name": f"hf:{small}"}}, "vocabulary of 100, but data.tokenizer has 257 ids: use the model's own"),
        (
            {"model": {"name": f"hf:{other}"}},
            f"for 600 tokens, .* set data.tokenizer to {other}, or model.start",
        ),
        ({"model": {"name": f"hf:{folder}"}, "data": {"seq_len": 65}}, "takes at most 64 tokens: lower data.seq_len"),
        ({"model": {"name": f"hf:{folder}", "frozen": ["x"]}}, "'x', which is no parameter"),
        ({"model": {"name": f"hf:{folder}", "lora_rank": 1, "lora_targets": ["x"]}}, "'x', which is no layer"),
        ({"model": {"start": f"{folder}"}}, r"embed_tokens.weight is \[257, 16\], but in model.name tiny"),
        ({"data": {"tokenizer": "/nowhere"}}, "data.tokenizer is /nowhere, but there is no such folder"),
    ]:
        contract = Contract.model_validate({"data": {"seq_len": 64}, **changes})
        with pytest.raises(SettingsError, match=line):
            check_replica(contract, ComputeConfig(device="cpu"))
    fresh = Contract.model_validate({"model": {"name": f"hf:{other}", "start": "random"}, "data": {"seq_len": 64}})
    check_replica(fresh, ComputeConfig(device="cpu"))
    good = Contract.model_validate({"model": {"name": f"hf:{folder}", "lora_rank": 1}, "data": {"seq_len": 64}})
    check_replica(good, ComputeConfig(device="cpu"))
    check_replica(Contract(), ComputeConfig(device="cpu"))


def test_a_worker_finds_it_out_before_it_starts_anything(tmp_path: Path) -> None:
    settings = load_settings(None, None, ["model.name=7b"])
    with pytest.raises(SettingsError, match=r"model.name is '7b'"):
        run_worker(settings, tmp_path / "out", run_id=None, resume=None, address_file=None)
    assert not (tmp_path / "out").exists()
