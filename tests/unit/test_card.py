"""A model card says what the run's files say, and leaves out what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from opendiloco.card import model_card, model_files, read_record
from opendiloco.config import Contract
from opendiloco.facts import RunFacts, Validation, read_facts
from opendiloco.rounds import Position

POSITION = Position(3, "3" * 64, "f" * 64, 123_456)
NOTHING = RunFacts(0, None, None, None, None, None, None)


def commit(round: int, *peers: str, sent: int = 1_000_000, lineage: str = "") -> dict[str, Any]:
    return {
        "event": "round",
        "round": round,
        "verdict": "commit",
        "participants": list(peers),
        "lineage": lineage or str(round) * 64,
        "sent_bytes": sent,
    }


def evaluation(round: int, loss: float | None, tokens: int = 60) -> dict[str, Any]:
    return {"event": "eval", "round": round, "loss": loss, "perplexity": 1.5, "tokens": tokens}


JOIN = {"event": "join", "round": 0, "source": "fresh"}
LIFE = [
    JOIN,
    evaluation(0, 5.5),
    commit(1, "a", "b", "c"),
    evaluation(1, 5.0),
    {**commit(2, "z"), "verdict": "retry"},
    commit(2, "a", "b", sent=3_000_000),
    commit(3, "a", "b", "d", sent=2_000_000),
    evaluation(3, 4.0),
]


def write(path: Path, *events: object) -> Path:
    path.write_text("".join(f"{event if isinstance(event, str) else json.dumps(event)}\n" for event in events))
    return path


def facts_of(tmp_path: Path, *events: object, position: Position | None = POSITION) -> RunFacts:
    return read_facts([write(tmp_path / "metrics.jsonl", *events)], position)


# --- facts ---------------------------------------------------------------------------------------------


def test_facts_are_those_of_the_committed_rounds(tmp_path: Path) -> None:
    assert facts_of(tmp_path, *LIFE) == RunFacts(
        rounds=3,
        participants=4,
        fewest=2,
        most=3,
        first=Validation(0, 5.5, 1.5, 60),
        last=Validation(3, 4.0, 1.5, 60),
        sent_bytes=2_000_000,
    )


def test_lines_that_are_cut_broken_or_of_another_shape_are_passed_over(tmp_path: Path) -> None:
    broken = [
        "{cut",
        "[]",
        "7",
        {"event": "round", "verdict": "commit"},
        {"event": "eval", "round": "x"},
        evaluation(0, None),
        {**commit(1), "participants": None, "sent_bytes": None},
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    assert facts_of(tmp_path, *broken[:-1]) == NOTHING
    assert facts_of(tmp_path, *broken, *LIFE) == facts_of(tmp_path, *LIFE)
    write(tmp_path / "metrics.jsonl", *LIFE)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "eval", "round": 3, "lo')
    assert read_facts([tmp_path / "metrics.jsonl"], POSITION) == facts_of(tmp_path, *LIFE)


def test_missing_metrics_tell_nothing(tmp_path: Path) -> None:
    assert read_facts([tmp_path / "nowhere.jsonl", tmp_path], POSITION) == NOTHING


def test_only_the_run_that_led_to_the_model_counts(tmp_path: Path) -> None:
    """A folder that was used before, rounds done again from a checkpoint, rounds after the exported one."""
    before = [JOIN, evaluation(0, 9.0), commit(1, "x", "y", "z", "u"), evaluation(3, 1.0)]
    redone = [commit(2, "w", "v"), evaluation(2, 8.0)]
    after = [commit(4, "o", "p", "q", "r"), evaluation(4, 3.0)]
    assert facts_of(tmp_path, *before, *LIFE[:4], *redone, *LIFE[4:], *after) == facts_of(tmp_path, *LIFE)


def test_a_worker_that_starts_from_nothing_again_is_not_credited_with_what_was_before(tmp_path: Path) -> None:
    again = facts_of(tmp_path, *LIFE, JOIN, commit(1, "q"), position=None)
    assert (again.rounds, again.participants, again.first) == (1, 1, None)


def test_a_round_that_was_given_up_for_another_lineage_does_not_count(tmp_path: Path) -> None:
    given_up = [commit(3, "a", lineage="9" * 64), evaluation(3, 1.0)]
    facts = facts_of(tmp_path, *LIFE[:-2], *given_up)
    assert (facts.rounds, facts.participants, facts.last) == (2, 3, Validation(1, 5.0, 1.5, 60))


def test_of_an_evaluation_in_parts_the_sum_counts(tmp_path: Path) -> None:
    parts = [evaluation(3, 9.0, tokens=20), evaluation(3, 4.5, tokens=60)]
    assert facts_of(tmp_path, *LIFE[:-1], *parts).last == Validation(3, 4.5, 1.5, 60)
    one = write(tmp_path / "one.jsonl", *LIFE[:-1], parts[1])
    other = write(tmp_path / "other.jsonl", *LIFE[2:-1], parts[0])
    facts = read_facts([one, other], POSITION)
    assert (facts.last, facts.first, facts.rounds) == (Validation(3, 4.5, 1.5, 60), Validation(0, 5.5, 1.5, 60), 3)


# --- the card ------------------------------------------------------------------------------------------


def contract_of(**sections: dict[str, object]) -> Contract:
    return Contract.model_validate({"run": {"id": "mine", "rounds": 5}} | sections)


def header(contract: Contract) -> dict[str, Any]:
    """As the hub's own library reads it."""
    values: dict[str, Any] = ModelCard(model_card(contract, None, NOTHING, weights="")).data.to_dict()
    return values


def test_header_says_how_to_use_the_model_and_states_no_licence() -> None:
    values = header(contract_of())
    assert values == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["diloco", "opendiloco"],
    }


@pytest.mark.parametrize(
    ("source", "datasets"),
    [
        ("hf:allenai/c4/en", ["allenai/c4"]),
        ("hf:allenai/c4", ["allenai/c4"]),
        ("hf:wikitext", ["wikitext"]),
        ("hf:/home/me/data", None),
        ("text:/home/me/book.txt", None),
        ("stdlib", None),
        ('hf:x"\ninjected: yes', None),
    ],
)
def test_header_names_data_and_model_of_the_hub_and_no_others(source: str, datasets: list[str] | None) -> None:
    model = "hf:org/base" if datasets else "hf:~/base"
    values = header(contract_of(data={"source": source}, model={"name": model}))
    assert values.get("datasets") == datasets
    assert values.get("base_model") == ("org/base" if datasets else None)
    assert "injected" not in values


def test_card_states_the_facts_of_the_run(tmp_path: Path) -> None:
    metrics = write(tmp_path / "metrics.jsonl", *LIFE)
    contract = contract_of(inner={"steps": 500, "lr": 0.001}, outer={"codec": "fp16"})
    card = model_files(contract, POSITION, parameters=1_234_567, metrics=[metrics], dtype="bf16")["README.md"]
    for fact in (
        "| model | `tiny`, 1,234,567 parameters in bf16 |",
        "| rounds committed | 3 of 5 |",
        "| tokens trained on, by all workers together | 123,456 |",
        "| workers | 4, and 2 to 3 took part in each round |",
        "| sent by a worker in a round | 2.00 MB |",
        f"| run contract (digest) | `{contract.digest}` |",
        "| between two rounds | H = 500 inner steps |",
        "adamw, lr 0.001 (50 steps of warm-up, then cosine)",
        "| outer optimizer | nesterov, lr 0.7, momentum 0.9, weights: uniform |",
        "| codec of the pseudo-gradients | fp16 |",
        "2.00% of the documents are held out, of which at most 64 sequences are read",
        "| 0 | 5.5000 | 1.50 | 60 |",
        "| 3 | 4.0000 | 1.50 | 60 |",
        f"`lineage` `{POSITION.lineage}`",
        f"`params_hash` `{POSITION.params_hash}`",
        "AutoModelForCausalLM.from_pretrained(",
        "opendiloco generate PATH",
        "Whoever publishes this model must add one",
        "Written by opendiloco 0.",
    ):
        assert fact in card, fact


def test_card_leaves_out_what_nobody_knows() -> None:
    card = model_card(contract_of(), None, NOTHING, weights="7 parameters in fp32")
    for word in ("None |", "nan", "committed", "tokens trained", "workers |", "MB", "Validation", "lineage", "hash"):
        assert word not in card, word


def test_card_says_of_how_many_rounds_it_knows(tmp_path: Path) -> None:
    late = write(tmp_path / "metrics.jsonl", {**JOIN, "round": 2, "source": "swarm"}, *LIFE[-2:])
    card = model_files(contract_of(), POSITION, parameters=7, metrics=[late])["README.md"]
    assert "3 took part in each round (rounds that the metrics at hand tell of: 1)" in card
    assert card.count("4.0000") == 1  # one evaluation is no before and after


@pytest.mark.parametrize("name", ["/home/me/secret/corpus.txt", "~/secret/corpus.txt", "secret/corpus.txt"])
def test_card_tells_strangers_no_paths_of_this_machine(name: str) -> None:
    contract = contract_of(
        data={"source": f"text:{name}", "tokenizer": "/home/me/secret/tok"}, model={"name": "hf:/home/me/secret/base"}
    )
    card = model_card(contract, None, NOTHING, weights="")
    assert "secret" not in card
    assert "`text:corpus.txt`" in card
    assert "`hf:base`" in card


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ({}, []),
        ({"lora_alpha": 32, "lora_targets": ["q_proj"]}, []),  # without adapters they say nothing
        ({"start": "random"}, ["| started from | seeded random values |"]),
        ({"start": "org/base"}, ["| started from | the weights of `org/base` |"]),
        ({"start": "/home/me/secret/base"}, ["| started from | the weights of `base` |"]),
        ({"start": "runs/secret/base/"}, ["| started from | the weights of `base` |"]),
        (
            {"frozen": ["model.embed_tokens.*", "*.[0-3].*"]},
            ["| not trained (frozen) | `model.embed_tokens.*`, `*.[0-3].*` |"],
        ),
        (
            {"start": "org/base", "lora_rank": 8},
            [
                "| started from | the weights of `org/base` |",
                "| trained | LoRA adapters alone (rank 8, alpha 16) on all linear layers but the output head; "
                "they are added to the weights here |",
            ],
        ),
        (
            {"lora_rank": 4, "lora_alpha": 32, "lora_targets": ["q_proj", "v_proj"]},
            [
                "| trained | LoRA adapters alone (rank 4, alpha 32) on `q_proj`, `v_proj`; "
                "they are added to the weights here |"
            ],
        ),
    ],
)
def test_card_says_what_was_trained_where_that_is_not_everything_from_the_beginning(
    model: dict[str, object], rows: list[str]
) -> None:
    def settings(contract: Contract) -> list[str]:
        return model_card(contract, None, NOTHING, weights="").partition("## Settings")[2].splitlines()

    plain = settings(contract_of())
    assert [line for line in settings(contract_of(model=model)) if line not in plain] == rows


@pytest.mark.parametrize(
    ("sections", "row"),
    [
        ({"data": {"source": "hf:a`|\n# Heading"}}, "| text | `hf:a # Heading` |"),
        ({"model": {"start": "a`|\n# Heading"}}, "| started from | the weights of `a # Heading` |"),
        ({"model": {"frozen": ["a|b`", "*\n\n# c"]}}, "| not trained (frozen) | `a b`, `* # c` |"),
        ({"model": {"lora_rank": 1, "lora_targets": ["a|\n`b"]}}, "(rank 1, alpha 16) on `a b`; they"),
    ],
)
def test_text_of_a_contract_cannot_break_out_of_its_cell(sections: dict[str, dict[str, object]], row: str) -> None:
    assert row in model_card(contract_of(**sections), None, NOTHING, weights="")


# --- the record ----------------------------------------------------------------------------------------


def test_record_in_the_folder_says_where_the_model_stands(tmp_path: Path) -> None:
    for name, text in model_files(contract_of(), POSITION, parameters=7, metrics=[]).items():
        (tmp_path / name).write_text(text)
    record = read_record(tmp_path)
    assert record is not None
    assert (record.contract, record.position) == (contract_of().digest, POSITION)


@pytest.mark.parametrize("text", [None, "{cut", "[]", '{"round": 3}', '{"round": null, "lineage": 1}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "diloco.json").write_text(text)
    assert read_record(tmp_path) is None
    assert "diloco.json" not in model_files(contract_of(), None, parameters=7, metrics=[])
