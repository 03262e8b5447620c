"""Who evaluates what follows from lineage and participants alone, and the parts add up to the whole."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from opendiloco import evaluate
from opendiloco.config import ComputeConfig, Contract, DataConfig, EvaluationConfig, ModelConfig
from opendiloco.errors import SettingsError
from opendiloco.evaluation import EvaluationPart, is_due, shares, total
from opendiloco.evaluator import Evaluator
from opendiloco.ledger import Ledger, SourceLedger
from opendiloco.metrics import EvalEvent, read_metrics
from opendiloco.model import build_model, save_model
from opendiloco.rounds import Position
from opendiloco.simulate import simulate
from opendiloco.tokenizer import ByteTokenizer

PEERS = ("a", "b", "c")
TEXT = DataConfig(source=f"text:{pytest.__file__}", seq_len=16, validation_fraction=0.5, validation_sequences=16)
LINEAGES = [f"{number:064x}" for number in range(90)]


# --- the rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every_rounds", "due"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6, 7]), (7, [0, 7]), (100, [0, 7])]
)
def test_the_first_and_the_last_parameters_are_evaluated_and_every_nth_between(
    every_rounds: int, due: list[int]
) -> None:
    assert [round for round in range(8) if is_due(round, every_rounds=every_rounds, last_round=7)] == due


def test_one_participant_evaluates_and_they_take_turns() -> None:
    chosen: Counter[str] = Counter()
    for lineage in LINEAGES:
        views = {
            peer: shares("one", lineage=lineage, participants=order, peer=peer)
            for peer, order in zip(PEERS, [PEERS, PEERS[::-1], ("b", "c", "a")], strict=True)
        }
        assert len({tuple(view) for view in views.values()}) == 1  # all agree, and it is one
        (evaluator,) = views["a"]
        assert views["a"][evaluator].is_all
        chosen[evaluator] += 1
    assert set(chosen) == set(PEERS)
    assert min(chosen.values()) > len(LINEAGES) / 6


@pytest.mark.parametrize("sequences", [64, 7, 2])
def test_participants_divide_the_sequences_and_leave_none_out(sequences: int) -> None:
    for lineage in LINEAGES[:20]:
        taken: list[int] = []
        for peer in PEERS:
            view = shares("shared", lineage=lineage, participants=PEERS, peer=peer)
            taken += range(sequences)[view[peer].of_sequences(sequences)]
            assert len(range(sequences)[view[peer].of_sequences(sequences)]) == view[peer].count(sequences)
        assert sorted(taken) == list(range(sequences))


@pytest.mark.parametrize("by", ["each", "one", "shared"])
def test_a_worker_alone_evaluates_everything(by: Literal["each", "one", "shared"]) -> None:
    for participants in ((), ("a",)):
        assert shares(by, lineage=LINEAGES[0], participants=participants, peer="a")["a"].is_all


@pytest.mark.parametrize(("by", "evaluates"), [("each", True), ("one", False), ("shared", False)])
def test_who_had_no_part_in_the_round_leaves_it_to_the_others(
    by: Literal["each", "one", "shared"], evaluates: bool
) -> None:
    assert ("late" in shares(by, lineage=LINEAGES[0], participants=PEERS, peer="late")) == evaluates


def part(loss: float, tokens: int) -> EvaluationPart:
    return EvaluationPart(LINEAGES[0], loss, tokens)


def test_the_sum_weighs_tokens_and_leaves_out_what_is_missing_wrong_or_no_number() -> None:
    expected = {"a": 30, "b": 10, "c": 20}
    whole = {"a": part(2.0, 30), "b": part(4.0, 10), "c": part(3.0, 20)}
    assert total(whole, expected) == total(dict(reversed(whole.items())), expected) == (pytest.approx(160 / 60), 60)
    assert total({"a": whole["a"], "b": whole["b"]}, expected) == (2.5, 40)
    for bad in (part(3.0, 2**40), part(math.nan, 20), part(math.inf, 20)):
        assert total(whole | {"c": bad}, expected) == (2.5, 40)
    assert total(whole | {"stranger": part(9.0, 30)}, expected) == (pytest.approx(160 / 60), 60)
    assert total({}, expected) is None


# --- simulated workers ---------------------------------------------------------------------------------


def evaluations(out: Path, by: str, every_rounds: int = 1) -> dict[str, list[tuple[int, float, int]]]:
    """Round, loss and tokens of every eval line of three workers, three rounds of one step."""
    contract = Contract.model_validate(
        {
            "run": {"id": "test", "rounds": 3},
            "data": {"source": f"text:{pytest.__file__}", "seq_len": 16, "validation_sequences": 4},
            "inner": {"warmup_steps": 0, "lr": 1e-3, "batch_size": 2, "steps": 1},
            "outer": {"codec": "none"},
            "evaluation": {"by": by, "every_rounds": every_rounds},
        }
    )
    workers = simulate(contract, ComputeConfig(device="cpu", threads=1), PEERS, out)
    assert len({worker.optimizer.params_hash for worker in workers}) == 1
    return {
        name: [
            (line["round"], line["loss"], line["tokens"])
            for line in read_metrics(out / name / "metrics.jsonl")
            if line["event"] == "eval"
        ]
        for name in PEERS
    }


@pytest.fixture(scope="module")
def each(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float, int]]]:
    return evaluations(tmp_path_factory.mktemp("each"), "each")


def test_each_worker_evaluates_everything_by_default(each: dict[str, list[tuple[int, float, int]]]) -> None:
    assert [(round, tokens) for round, _, tokens in each["a"]] == [(round, 60) for round in range(4)]
    assert each["a"] == each["b"] == each["c"]


def test_one_worker_finds_every_second_round_what_all_would_have_found(
    each: dict[str, list[tuple[int, float, int]]], tmp_path: Path
) -> None:
    found = evaluations(tmp_path, "one", every_rounds=2)
    at_start = [lines[0] for lines in found.values()]  # nobody has had a part in anything
    later = [line for lines in found.values() for line in lines[1:]]
    assert at_start == [each["a"][0]] * 3
    assert sorted(later) == each["a"][2:]
    assert [line[0] for line in each["a"][2:]] == [2, 3]


def test_parts_of_a_round_add_up_to_one_number_that_everybody_has(
    each: dict[str, list[tuple[int, float, int]]], tmp_path: Path
) -> None:
    found = evaluations(tmp_path, "shared")
    for round, loss, tokens in each["a"][1:]:
        of_round = [[line for line in lines if line[0] == round] for lines in found.values()]
        parts, sums = [lines[0] for lines in of_round], [lines[1] for lines in of_round]
        assert [len(lines) for lines in of_round] == [2, 2, 2]
        assert sorted(line[2] for line in parts) == [15, 15, 30]  # 4 sequences of 15 predicted tokens among 3
        assert sums == [(round, pytest.approx(loss, rel=1e-6), tokens)] * 3
        assert len({line[1] for line in sums}) == 1


# --- parts that do not come ----------------------------------------------------------------------------


@dataclass
class Others:
    """What an evaluator needs of a swarm: the others answer when the test says so."""

    peer_id: str = "a"
    told: list[EvaluationPart] = field(default_factory=list)
    answer: Future[dict[str, EvaluationPart]] = field(default_factory=Future)

    def share_evaluation(self, part: EvaluationPart, peers: tuple[str, ...]) -> Future[dict[str, EvaluationPart]]:
        assert sorted(peers) == ["a", "b"]
        self.told.append(part)
        return self.answer


def shared_evaluation() -> tuple[Evaluator, Others, list[EvalEvent]]:
    """One after round 1, of which worker a has done its half."""
    others, events = Others(), list[EvalEvent]()
    contract = Contract(evaluation=EvaluationConfig(by="shared"))
    batches = [torch.zeros(2, 8, dtype=torch.int64)] * 2
    swarm: Any = others
    evaluator = Evaluator(contract, batches, swarm, compute=ComputeConfig(), end_id=None, report=events.append)
    model = build_model(contract.model, vocab_size=257, seq_len=8, seed=0)
    position = Position(
        1, LINEAGES[1], "", ledger=Ledger(sources=(SourceLedger(untouched=2, readers={"a": 0, "b": 1}),))
    )
    evaluator.evaluate(model, position, between=lambda: None)
    assert [(event.round, event.tokens) for event in events] == [(1, 14)]
    assert [(told.lineage, told.tokens) for told in others.told] == [(LINEAGES[1], 14)]
    return evaluator, others, events


def test_a_sum_is_reported_once_when_it_is_known() -> None:
    evaluator, others, events = shared_evaluation()
    evaluator.report_sums()
    assert len(events) == 1
    others.answer.set_result({"a": others.told[0], "b": EvaluationPart(LINEAGES[1], others.told[0].loss + 2, 14)})
    evaluator.report_sums()
    evaluator.finish(lambda: False)
    assert [event.tokens for event in events] == [14, 28]
    assert events[1].loss == pytest.approx(events[0].loss + 1)
    assert events[1].perplexity == pytest.approx(math.exp(events[1].loss))


def test_one_of_several_processes_evaluates_as_many_sequences_at_a_time_as_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[int] = []
    loss = evaluate.causal_lm_loss

    def note(model: Any, tokens: torch.Tensor, *, end_id: int | None) -> torch.Tensor:
        batches.append(len(tokens))
        return loss(model, tokens, end_id=end_id)

    monkeypatch.setattr(evaluate, "causal_lm_loss", note)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    shared_evaluation()
    assert batches == [1, 1]


def test_a_part_that_never_comes_leaves_the_own_number_and_does_not_keep_a_worker_that_wants_to_leave() -> None:
    evaluator, others, events = shared_evaluation()
    evaluator.finish(lambda: True)
    others.answer.set_result({"a": others.told[0]})
    evaluator.finish(lambda: False)
    assert [event.tokens for event in events] == [14]


# --- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    model = build_model(ModelConfig(), vocab_size=ByteTokenizer().vocab_size, seq_len=16, seed=0)
    save_model(model, ByteTokenizer(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("micro_batch_size", "sizes"), [(0, {8}), (2, {2})])
def test_eval_takes_as_many_sequences_at_a_time_as_the_settings_say(
    micro_batch_size: int,
    sizes: set[int],
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: set[int] = set()
    loss = evaluate.causal_lm_loss

    def note(model: Any, tokens: torch.Tensor, *, end_id: int | None) -> torch.Tensor:
        found.add(len(tokens))
        return loss(model, tokens, end_id=end_id)

    monkeypatch.setattr(evaluate, "causal_lm_loss", note)
    compute = ComputeConfig(device="cpu", micro_batch_size=micro_batch_size)
    assert evaluate.run_eval(model_dir, TEXT, compute=compute) == 0
    assert found == sizes
    assert "validation loss" in capsys.readouterr().out


def test_eval_says_in_one_line_what_does_not_fit(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = ComputeConfig(device="cpu")
    with pytest.raises(SettingsError, match=r"data.seq_len is 32, but model.name .*model takes at most 16 tokens"):
        evaluate.run_eval(model_dir, TEXT.model_copy(update={"seq_len": 32}), compute=cpu)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(evaluate, "causal_lm_loss", full)
    with pytest.raises(SettingsError, match=r"all 8 sequences at once, .* try compute.micro_batch_size=4$"):
        evaluate.run_eval(model_dir, TEXT, compute=cpu)
    one = ComputeConfig(device="cpu", micro_batch_size=1)
    with pytest.raises(SettingsError, match=r"micro_batch_size is 1\): try compute.precision=bf16, or a run with"):
        evaluate.run_eval(model_dir, TEXT, compute=one)
    monkeypatch.setattr(nn.Module, "to", full)
    with pytest.raises(SettingsError, match="does not fit on cpu"):
        evaluate.run_eval(model_dir, TEXT, compute=cpu)
