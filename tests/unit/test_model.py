"""Claims about presets, initial parameters, the loss, saved folders and generated text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config, ViTConfig

from opendiloco.config import ModelConfig
from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.generation import generate_text
from opendiloco.loss import causal_lm_loss
from opendiloco.model import build_model, count_parameters, load_model, save_model
from opendiloco.presets import PRESETS, preset_config
from opendiloco.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def tiny(*, seed: int = 0, seq_len: int = 32) -> Any:
    return build_model(ModelConfig(), vocab_size=257, seq_len=seq_len, seed=seed)


def digest(model: Any) -> str:
    return blake3(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def write_config(folder: Path, *, vocab_size: int = 257, context: int = 64) -> LlamaConfig:
    """The config.json of a very small Llama."""
    small = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context,
    )
    small.save_pretrained(folder)
    return small


PAPERS = {"60m": 60, "150m": 150, "400m": 400, "1b": 1100}
"""Millions that arXiv:2311.08105 and arXiv:2407.07852 (TinyLlama 1.1B) give, with a vocabulary of 32,000."""


@pytest.mark.parametrize(
    ("name", "vocab_size", "millions"),
    [
        ("tiny", 257, 0.98),
        ("14m", 32_000, 14.2),
        ("60m", 32_000, 59.3),
        ("150m", 32_000, 151.2),
        ("400m", 32_000, 388.9),
        ("1b", 32_000, 1100.0),
    ],
)
def test_presets_have_the_size_of_their_name(name: str, vocab_size: int, millions: float) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(preset_config(name, vocab_size=vocab_size, seq_len=1024))
    if name in PAPERS:
        assert count_parameters(model) / 1e6 == pytest.approx(PAPERS[name], rel=0.03)
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.005)


def test_every_preset_has_a_size_claim() -> None:
    assert set(PRESETS) == {"tiny", "14m", "60m", "150m", "400m", "1b"}


def test_initial_parameters_are_the_same_bits_everywhere() -> None:
    assert digest(tiny(seed=0)) == GOLDEN
    assert digest(tiny(seed=1)) != GOLDEN


GOLDEN = "4edef88f2f7a43b99b8efeb50d99303fd697b5c5124a16eaa54a4743793fff6b"


def test_initial_parameters_do_not_depend_on_global_state_nor_change_it() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert digest(model) == GOLDEN
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_initial_matrices_have_mean_zero_and_the_asked_deviation() -> None:
    weight = tiny().model.layers[0].mlp.up_proj.weight.detach()
    assert float(weight.mean()) == pytest.approx(0.0, abs=5e-4)
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(weight.abs().max()) < 4 * 0.02
    assert torch.equal(tiny().model.norm.weight, torch.ones(128))


def test_model_trains_with_sdpa_and_without_cache() -> None:
    model = tiny()
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.config.use_cache is False


def test_fresh_model_is_as_good_as_guessing_and_loss_is_over_next_tokens() -> None:
    model = tiny()
    tokens = torch.randint(0, 257, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss, expected = causal_lm_loss(model, tokens), model(input_ids=tokens, labels=tokens).loss
    assert loss.shape == ()
    assert float(loss) == pytest.approx(math.log(257), rel=0.02)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_loss_of_a_token_does_not_see_the_future() -> None:
    model = tiny().eval()
    tokens = torch.randint(0, 257, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 257
    before, after = (model(input_ids=t, use_cache=False).logits[:, :-1] for t in (tokens, changed))
    torch.testing.assert_close(before, after)


def test_tied_parameters_count_once() -> None:
    model = tiny()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert count_parameters(model) == sum(t.numel() for n, t in model.state_dict().items() if n != "lm_head.weight")


# --- Hugging Face folders ------------------------------------------------------------------------------


def test_folder_with_weights_gives_these_weights(tmp_path: Path) -> None:
    model = LlamaForCausalLM(write_config(tmp_path))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    built = build_model(ModelConfig(name=f"hf:{tmp_path}"), vocab_size=257, seq_len=64, seed=0)
    assert {p.dtype for p in built.parameters()} == {torch.float32}
    assert digest(built) == digest(model.float())
    assert built.training


def test_folder_with_a_config_alone_gives_seeded_parameters(tmp_path: Path) -> None:
    write_config(tmp_path)
    named = ModelConfig(name=f"hf:{tmp_path}")
    digests = []
    for global_seed, seed in [(1, 0), (2, 0), (1, 5)]:
        torch.manual_seed(global_seed)
        digests.append(digest(build_model(named, vocab_size=257, seq_len=64, seed=seed)))
    assert digests[0] == digests[1] != digests[2]


def test_unsuitable_models_are_one_line_with_a_cure(tmp_path: Path) -> None:
    write_config(tmp_path / "small", vocab_size=100, context=64)
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    T5Config(num_layers=1).save_pretrained(tmp_path / "t5")
    ViTConfig().save_pretrained(tmp_path / "vit")
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "strange"}')
    (tmp_path / "cut").mkdir()
    write_config(tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\0" * 100)
    for name, vocab_size, seq_len, match in [
        ("7b", 257, 64, r"^model.name is '7b': use tiny, 14m, 60m, 150m, 400m, 1b or hf:NAME_OR_PATH"),
        (f"hf:{tmp_path}/none", 257, 64, "there is no such folder: correct the path"),
        (f"hf:{tmp_path}/empty", 257, 64, "holds no model"),
        (f"hf:{tmp_path}/strange", 257, 64, "holds no model"),
        (f"hf:{tmp_path}/t5", 257, 64, "is no causal language model"),
        (f"hf:{tmp_path}/vit", 257, 64, "is no causal language model"),
        (f"hf:{tmp_path}/small", 257, 64, "vocabulary of 100, but data.tokenizer has 257 ids: use the model's own"),
        (f"hf:{tmp_path}/small", 100, 65, r"^data.seq_len is 65, but .* takes at most 64 tokens: lower"),
        (f"hf:{tmp_path}/cut", 257, 64, "the weights of .*cut cannot be read"),
    ]:
        with pytest.raises(SettingsError, match=match) as caught:
            build_model(ModelConfig(name=name), vocab_size=vocab_size, seq_len=seq_len, seed=0)
        assert "\n" not in str(caught.value)


# --- saved folders -------------------------------------------------------------------------------------


def test_saved_folder_gives_back_model_and_tokenizer_alone(tmp_path: Path) -> None:
    model = tiny()
    save_model(model, BYTES, tmp_path / "out" / "model")
    loaded, tokenizer = load_model(tmp_path / "out" / "model")
    assert digest(loaded) == digest(model)
    assert isinstance(tokenizer, ByteTokenizer)
    assert not loaded.training
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["model"]
    files = [path for path in (tmp_path / "out" / "model").iterdir() if path.is_file()]
    assert "model.safetensors" in [path.name for path in files]
    assert len({path.stat().st_mode for path in files}) == 1  # whoever may read one may read all


def test_saved_folder_works_with_transformers_alone(tmp_path: Path) -> None:
    save_model(tiny(), BYTES, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("h\xe9")["input_ids"] == BYTES.encode("h\xe9")
    assert model.config.eos_token_id == tokenizer.eos_token_id == BYTES.end_id
    assert model.config.use_cache is True
    assert digest(model) == GOLDEN


def test_failed_save_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    old = tiny()
    save_model(old, BYTES, folder)
    new = tiny(seed=1)

    def half(place: Path) -> None:
        (place / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(new, "save_pretrained", half)
    with pytest.raises(OpendilocoError, match=r"cannot be written to .*/model \(disk full\): make room"):
        save_model(new, BYTES, folder)
    assert digest(load_model(folder)[0]) == digest(old)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
    monkeypatch.undo()
    save_model(new, BYTES, folder)
    assert digest(load_model(folder)[0]) == digest(new)


def test_saving_does_not_replace_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SettingsError, match="not empty and holds no model"):
        save_model(tiny(), BYTES, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_folder_without_model_or_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="holds no model"):
        load_model(tmp_path / "none")
    LlamaForCausalLM(write_config(tmp_path)).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="holds no tokenizer"):
        load_model(tmp_path)


def test_a_workers_folder_in_the_place_of_its_model_is_told_where_that_is(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SettingsError, match=r"name one that training wrote$"):
        load_model(tmp_path)
    save_model(tiny(), BYTES, tmp_path / "model")
    with pytest.raises(SettingsError, match=rf"{tmp_path} holds no model \(.*\): name {tmp_path}/model$"):
        load_model(tmp_path)


# --- generated text ------------------------------------------------------------------------------------


def test_text_follows_the_seed_and_goes_on_beyond_the_context() -> None:
    model = tiny(seq_len=16)
    texts = []
    for global_seed, seed in [(1, 0), (2, 0), (1, 3)]:
        torch.manual_seed(global_seed)
        texts.append(generate_text(model, BYTES, "a" * 40, max_new_tokens=50, temperature=1.0, seed=seed))
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) > 16
    assert model.training


def test_temperature_zero_takes_the_likeliest_token() -> None:
    model = tiny(seq_len=16).eval()
    text = generate_text(model, BYTES, "abc", max_new_tokens=1, temperature=0, seed=0)
    logits = model(input_ids=torch.tensor([list(b"abc")])).logits[0, -1]
    assert text == BYTES.decode([int(logits.argmax())])


def test_text_ends_with_the_document_and_an_empty_prompt_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(seq_len=16)
    with torch.no_grad():
        model.model.norm.weight.fill_(0)  # all logits are equal: the likeliest token is the first
    assert generate_text(model, BYTES, "", max_new_tokens=3, temperature=0, seed=0) == "\0\0\0"
    ending = ByteTokenizer()
    monkeypatch.setattr(ending, "end_id", 0)
    assert len(generate_text(model, ending, "x", max_new_tokens=30, temperature=0, seed=0)) <= 1


def test_saved_config_is_plain_json(tmp_path: Path) -> None:
    save_model(tiny(), BYTES, tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert content["model_type"] == "llama"
    assert content["vocab_size"] == 257
