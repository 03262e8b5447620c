"""A transformers.Trainer in a swarm: its steps, schedule, checkpoints, log and end are those of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from opendiloco.callback import DiLoCoCallback
from opendiloco.codec import get_codec
from opendiloco.config import Contract
from opendiloco.errors import SettingsError
from opendiloco.phase import InnerPhase
from opendiloco.rounds import Position, Recovery, RoundRequest
from opendiloco.simulated import SimulatedGroup, SimulatedSwarm

ROUNDS, H, BATCH, LENGTH = 3, 2, 2, 6
LR = 0.01

MakeTrainer = Callable[..., Trainer]


class Watch(TrainerCallback):
    """What others see of the training."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.saved: list[int] = []
        self.evaluated: list[int] = []
        self.began_with: dict[str, Tensor] = {}
        self.at_step: Callable[[], None] = lambda: None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began_with = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(state.global_step)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    def make(*, sequences: int = 64, eval_dataset: object = None, **arguments: Any) -> Trainer:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        data = [{"input_ids": part, "labels": part} for part in torch.arange(sequences * LENGTH).remainder(16).split(6)]
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "trainer"),
            "per_device_train_batch_size": BATCH,
            "learning_rate": LR,
            "lr_scheduler_type": "linear",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
        }
        return Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(**{**defaults, **arguments}),
            train_dataset=data,
            eval_dataset=data[:2] if eval_dataset else None,
        )

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def contract_of(**settings: Any) -> Contract:
    return Contract.model_validate(
        {"run": {"rounds": ROUNDS}, "inner": {"steps": H}, "outer": {"codec": "none"}, **settings}
    )


def alone() -> SimulatedSwarm:
    return SimulatedGroup(["a"], get_codec("none")).member("a")


def stand_at_round(swarm: SimulatedSwarm, round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swarm is there, with a theta of 0.1 everywhere; whoever catches up with it joins there."""

    def catch_up() -> Future[Recovery]:
        swarm.vectors["theta"].fill_(0.1)
        swarm.committed(Position(round, "ab" * 32, "", tokens=40))
        return SimulatedSwarm.catch_up(swarm)

    monkeypatch.setattr(swarm, "catch_up", catch_up)


def enter(trainer: Trainer, swarm: SimulatedSwarm, contract: Contract | None = None) -> tuple[DiLoCoCallback, Watch]:
    watch, callback = Watch(), DiLoCoCallback(trainer, swarm, contract or contract_of())
    trainer.add_callback(callback)
    trainer.add_callback(watch)
    return callback, watch


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def linear_rates(first: int, total: int = ROUNDS * H) -> list[float]:
    return [LR * (1 - step / total) for step in range(first, total)]


def test_trainer_ends_after_the_last_round_with_the_outer_parameters(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(gradient_accumulation_steps=2, max_grad_norm=0.5)
    callback, watch = enter(trainer, alone())
    before = flat(trainer.model).clone()
    result = trainer.train()
    assert (result.global_step, callback.optimizer.round) == (ROUNDS * H, ROUNDS)
    assert torch.equal(flat(trainer.model), callback.optimizer.outer.theta)
    assert not torch.equal(flat(trainer.model), before)
    assert watch.rates == pytest.approx(linear_rates(0))
    history = trainer.state.log_history
    rounds = [line for line in history if "round" in line]
    assert [(line["round"], line["round_committed"], line["step"]) for line in rounds] == [
        (round, 1, round * H) for round in range(1, ROUNDS + 1)
    ]
    assert all(line["outer_gradient_norm"] > 0 for line in rounds)
    assert len([line for line in history if "loss" in line]) == ROUNDS * H


def test_tokens_are_counted_where_they_are_weights(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, requests = alone(), list[RoundRequest]()

    def average(request: RoundRequest) -> object:
        requests.append(request)
        return SimulatedSwarm.average(swarm, request)

    monkeypatch.setattr(swarm, "average", average)
    trainer = make_trainer(gradient_accumulation_steps=2)
    enter(trainer, swarm, contract_of(outer={"codec": "none", "weighting": "tokens"}))
    trainer.train()
    assert [request.weight for request in requests] == [2 * BATCH * LENGTH * H] * ROUNDS


def test_joiner_has_the_swarms_parameters_learning_rate_and_end(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = alone()
    stand_at_round(swarm, ROUNDS - 1, monkeypatch)
    trainer = make_trainer()
    callback, watch = enter(trainer, swarm)
    assert bool((flat(trainer.model) == 0.1).all())
    assert trainer.train().global_step == H
    assert watch.rates == pytest.approx(linear_rates((ROUNDS - 1) * H))
    assert callback.optimizer.round == ROUNDS


def test_rounds_of_fixed_length_go_on_until_their_time_is_over(make_trainer: MakeTrainer) -> None:
    now = [0.0]
    contract = contract_of(rounds={"deadline": 10.0}, outer={"codec": "none", "weighting": "tokens"})
    trainer = make_trainer(sequences=4)
    callback, watch = enter(trainer, alone(), contract)
    callback.optimizer.phase = InnerPhase(contract, lambda: now[0])
    watch.at_step = lambda: now.__setitem__(0, now[0] + 1.0)
    result = trainer.train()
    assert callback.optimizer.round == ROUNDS
    assert result.global_step > ROUNDS * H
    assert watch.rates[0] == LR
    assert watch.rates[-1] == pytest.approx(LR / (ROUNDS * H))


def test_checkpoints_and_evaluations_wait_for_the_outer_parameters(make_trainer: MakeTrainer) -> None:
    steps = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(eval_dataset=True, **steps)
    callback, watch = enter(trainer, alone())
    thetas: dict[int, Tensor] = {}
    watch.at_step = lambda: thetas.update({callback.optimizer.round: callback.optimizer.outer.theta.clone()})
    trainer.train()
    assert watch.saved == watch.evaluated == [H * round for round in range(1, ROUNDS + 1)]
    for round in range(1, ROUNDS + 1):
        saved = load_file(Path(trainer.args.output_dir) / f"checkpoint-{round * H}" / "model.safetensors")
        trainer.model.load_state_dict(saved, strict=False)
        assert torch.equal(flat(trainer.model), thetas[round])


def test_resumed_trainer_goes_on_from_the_swarm_or_not_at_all(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, swarm = make_trainer(save_strategy="steps", save_steps=1), alone()
    monkeypatch.setattr(swarm, "leaving", lambda: first.state.global_step == H)
    _, watch = enter(first, swarm)
    first.train()
    assert watch.saved[0] == H

    swarm = alone()
    stand_at_round(swarm, ROUNDS - 1, monkeypatch)
    trainer = make_trainer()
    callback, watch = enter(trainer, swarm)
    trainer.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-{H}")
    assert all(bool((value == 0.1).all()) for name, value in watch.began_with.items() if "rotary" not in name)
    assert {state["step"].item() for state in callback.optimizer.state.values()} == {2.0 * H}
    assert watch.rates == pytest.approx(linear_rates((ROUNDS - 1) * H))

    trainer = make_trainer()
    enter(trainer, alone())
    with pytest.raises(SettingsError, match="the run is at round 0"):
        trainer.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-{H}")


def test_trainer_of_a_run_that_is_over_is_told_so_and_has_its_model(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, trainer = alone(), make_trainer()
    stand_at_round(swarm, ROUNDS, monkeypatch)
    enter(trainer, swarm)
    with pytest.raises(SettingsError, match="all 3 rounds of the run are done"):
        trainer.train()
    assert bool((flat(trainer.model) == 0.1).all())


def test_request_to_leave_ends_the_trainer_in_order(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, asked = alone(), list[bool]()
    monkeypatch.setattr(swarm, "leaving", lambda: bool(asked))
    trainer = make_trainer(save_strategy="epoch")
    callback, watch = enter(trainer, swarm)
    watch.at_step = lambda: asked.append(True) if trainer.state.global_step == H else None
    assert trainer.train().global_step == H + 1
    assert callback.optimizer.has_left
    assert torch.equal(flat(trainer.model), callback.optimizer.outer.theta)


def test_a_worker_that_leaves_evaluates_nothing_more(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, asked = alone(), list[bool]()
    monkeypatch.setattr(swarm, "leaving", lambda: bool(asked))
    steps = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(eval_dataset=True, **steps)
    callback, watch = enter(trainer, swarm)
    watch.at_step = lambda: asked.append(True) if trainer.state.global_step == H else None
    trainer.train()
    assert callback.optimizer.has_left
    assert (watch.evaluated, watch.saved) == ([H], [H, H + 1])


@pytest.mark.parametrize("skipped", [1, H + 1])
def test_steps_that_a_scaler_skips_do_not_end_the_training(make_trainer: MakeTrainer, skipped: int) -> None:
    """An epoch is as long as the run here: what the trainer had planned would be over with it."""
    trainer = make_trainer(sequences=ROUNDS * H * BATCH, save_strategy="steps", save_steps=0.5, logging_steps=0.5)
    callback, watch = enter(trainer, alone())
    step, attempts = trainer.optimizer.step, iter(range(1000))
    trainer.optimizer.step = lambda *args: step(*args) if next(attempts) >= skipped else None
    assert trainer.train().global_step == ROUNDS * H + skipped
    assert callback.optimizer.round == ROUNDS
    assert (trainer.state.save_steps, trainer.state.logging_steps) == (ROUNDS * H / 2, ROUNDS * H / 2)
    assert watch.rates[skipped:] == pytest.approx(linear_rates(0))


def test_progress_is_shown_towards_the_end_of_the_run(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = alone()
    stand_at_round(swarm, 1, monkeypatch)
    trainer = make_trainer(disable_tqdm=False)
    _, watch = enter(trainer, swarm)
    bars = [callback for callback in trainer.callback_handler.callbacks if hasattr(callback, "training_bar")]
    totals: list[int] = []
    watch.at_step = lambda: totals.append(bars[0].training_bar.total)
    trainer.train()
    assert set(totals) == {(ROUNDS - 1) * H}


def test_a_scheduler_that_is_none_of_torchs_is_left_alone(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(lr_scheduler_type="greedy", eval_dataset=True, eval_strategy="steps", eval_steps=H)
    callback, _ = enter(trainer, alone())
    trainer.train()
    assert callback.optimizer.round == ROUNDS


def test_data_that_ends_before_the_run_is_said(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    _, watch = enter(trainer, alone())
    watch.at_step = lambda: setattr(trainer.control, "should_training_stop", True)
    trainer.train()
    assert f"training ends after round 0 of {ROUNDS}" in caplog.text


def test_workers_shuffle_in_orders_of_their_own(make_trainer: MakeTrainer) -> None:
    def order(name: str) -> list[int]:
        trainer = make_trainer()
        enter(trainer, SimulatedGroup([name], get_codec("none")).member(name))
        return [int(batch["input_ids"].sum()) for batch in trainer.get_train_dataloader()]

    assert order("a") == order("a")
    assert order("a") != order("b")


def test_a_worker_that_starts_again_reads_in_another_order_unless_it_goes_on_from_a_checkpoint(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def life(round: int, checkpoint: str | None = None) -> list[list[int]]:
        """The numbers of the sequences in each batch of a worker that enters at `round`."""
        trainer, swarm = make_trainer(save_strategy="steps", save_steps=1, remove_unused_columns=False), alone()
        stand_at_round(swarm, round, monkeypatch)
        trainer.train_dataset = [{**each, "number": number} for number, each in enumerate(trainer.train_dataset)]
        collate, read = trainer.data_collator, list[list[int]]()

        def collate_and_tell(batch: list[dict[str, Any]]) -> Any:
            read.append([each["number"] for each in batch])
            return collate([{name: value for name, value in each.items() if name != "number"} for each in batch])

        trainer.data_collator = collate_and_tell
        enter(trainer, swarm)
        trainer.train(resume_from_checkpoint=checkpoint)
        return read[: (ROUNDS - round) * H]

    whole = life(0)
    folder = f"{make_trainer().args.output_dir}/checkpoint-{H}"
    assert life(1, folder) == whole[H:]
    assert not any(batch in whole[:H] for batch in life(1))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda trainer: setattr(trainer, "model_init", lambda: None), "model_init"),
        (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "FSDP"),
        (lambda trainer: setattr(trainer.args, "data_seed", 7), "data_seed is 7"),
        (lambda trainer: enter(trainer, alone()), "in a swarm already"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(
    make_trainer: MakeTrainer, change: Callable[[Trainer], object], complaint: str
) -> None:
    trainer = make_trainer()
    change(trainer)
    with pytest.raises(SettingsError, match=complaint):
        DiLoCoCallback(trainer, alone(), contract_of())


def test_figures_of_rounds_are_numbers(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    enter(trainer, alone())
    trainer.train()
    assert all(
        isinstance(value, (int, float)) and math.isfinite(value)
        for line in trainer.state.log_history
        for value in line.values()
    )
