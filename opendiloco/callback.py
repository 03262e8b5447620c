"""A callback that makes a `transformers.Trainer` a worker of a run."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from opendiloco.averager import Averager
from opendiloco.config import Contract
from opendiloco.diloco import DiLoCo
from opendiloco.errors import SettingsError
from opendiloco.report import RoundReport
from opendiloco.schedule import align

SLACK = 2
"""Times the run's steps, for which the trainer plans epochs: steps that count nowhere come on top (what fp16's scaler
skips, what is dropped or too late)."""
WITHOUT_END = 1000
"""The same where rounds have a fixed length: they end with their time, not with a step."""
_SEED = "opendiloco"  # its key in a checkpoint's trainer_state.json

logger = logging.getLogger(__name__)


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]
    """Puts a trainer's optimizer into DiLoCo, and keeps its schedule, checkpoints and end those of the run.

    Make it once the trainer is as it shall be, add it with `trainer.add_callback`, then call `trainer.train()`. One
    step of the trainer's optimizer is one inner step, however many batches it accumulates. `max_steps` is not used: the
    run's last round ends the training. Checkpoints and evaluations that fall due within an inner phase come at its end,
    when the model holds the outer parameters. Every round is a line of the trainer's log.
    """

    def __init__(self, trainer: Any, swarm: Averager, contract: Contract) -> None:
        """Enter the run with the trainer's model and optimizer, and wait until its first round may start.

        Args:
            trainer: a `transformers.Trainer`, or a subclass.

        Raises:
            SettingsError: a way of training that this callback cannot put into a swarm; or see `DiLoCo`.
        """
        _check(trainer)
        args, self._trainer = trainer.args, trainer
        self._makes_schedule = trainer.lr_scheduler is None
        self._reports: list[RoundReport] = []
        self._due: set[str] = set()
        self._counted, self._rounds = 0, contract.run.rounds
        self.optimizer = DiLoCo(
            trainer.create_optimizer(), trainer.model, swarm, contract, on_round=self._reports.append
        ).__enter__()
        trainer.optimizer = self.optimizer
        torch.manual_seed(self.optimizer.seed)  # what the trainer shuffles its data by
        self._plan(args, SLACK if contract.rounds.deadline == "adaptive" else WITHOUT_END)
        if contract.outer.weighting == "tokens" and args.include_num_input_tokens_seen in (False, "no"):
            args.include_num_input_tokens_seen = "all"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer may have loaded a checkpoint: its moments are welcome, parameters are the swarm's.

        Raises:
            SettingsError: nothing is left to do, or the checkpoint is all that is left of the run.
        """
        self.optimizer.write_outer_parameters()
        if self.optimizer.round >= self._rounds:
            raise SettingsError(
                f"all {self._rounds} rounds of the run are done and the model holds their result: save it, or train "
                "in a new run (another run.id)"
            )
        if state.global_step > 0 and self.optimizer.round == 0:
            raise SettingsError(
                f"resume_from_checkpoint names step {state.global_step}, and the run is at round 0: its state comes "
                "from workers that train, and none is left. Start a new run (another run.id) whose workers all load "
                "the checkpoint's model with from_pretrained"
            )
        self._counted = state.num_input_tokens_seen
        self._show_steps_left(state)
        self._shuffle_as_before(state, kwargs.get("train_dataloader"))
        if self._makes_schedule:
            self._trainer.lr_scheduler = None  # the trainer has made one for the steps that it believes in
            self._trainer.create_scheduler(num_training_steps=self.optimizer.total_steps)
        align(self._trainer.lr_scheduler, self.optimizer.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the optimizer how many tokens the batches of this step had."""
        self.optimizer.count_tokens(state.num_input_tokens_seen - self._counted)
        self._counted = state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the trainer has stepped its scheduler."""
        align(self._trainer.lr_scheduler, self.optimizer.global_step)
        self._log_rounds(control)
        if self.optimizer.is_done:
            control.should_training_stop = True
            if not self.optimizer.has_left:
                control.should_save |= args.save_strategy == SaveStrategy.STEPS
                control.should_evaluate |= args.eval_strategy == IntervalStrategy.STEPS
        elif state.global_step >= state.max_steps:
            logger.warning("the run goes on after max_steps: a part of this worker's work did not count")
            state.max_steps += 1
            control.should_training_stop = False
        self._postpone(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checkpoints and evaluations of epochs wait, too."""
        self._postpone(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model holds the outer parameters when the trainer is done, or what it took for the best ones."""
        if not self.optimizer.is_done:
            logger.warning(
                "training ends after round %d of %d: this worker's data ended, or a callback stopped it",
                self.optimizer.round,
                self._rounds,
            )
        self.optimizer.finish()
        if not args.load_best_model_at_end:
            self.optimizer.write_outer_parameters()

    def _plan(self, args: Any, slack: int) -> None:
        """Have the trainer go on until the run ends; shares of max_steps stay shares of the run's steps."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None and 0 < steps < 1:
                setattr(args, name, math.ceil(self.optimizer.total_steps * steps))
        args.max_steps = self.optimizer.total_steps * slack

    def _show_steps_left(self, state: Any) -> None:
        """The trainer's progress bar is drawn already, for max_steps."""
        for callback in self._trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.total = state.global_step + self.optimizer.total_steps - self.optimizer.global_step
                bar.refresh()

    def _shuffle_as_before(self, state: Any, loader: Any) -> None:
        """A checkpoint's place in the data is one in the order of the worker that began to write them."""
        seed = state.stateful_callbacks.setdefault(_SEED, {"seed": self.optimizer.seed})["seed"]
        if seed == self.optimizer.seed:
            return
        torch.manual_seed(seed)
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if hasattr(sampler, "initial_seed"):  # accelerate's, which keeps the seed of its beginning
            sampler.initial_seed = seed

    def _postpone(self, control: Any) -> None:
        """Take what is due within a phase back until its end; nobody who leaves waits for an evaluation."""
        self._due |= {name for name in ("should_save", "should_evaluate") if getattr(control, name)}
        if self.optimizer.has_left:
            self._due.discard("should_evaluate")
            control.should_evaluate = False
        is_between_rounds = self.optimizer.phase.steps_done == 0 or control.should_training_stop
        for name in self._due:
            setattr(control, name, is_between_rounds)
        if is_between_rounds:
            self._due.clear()

    def _log_rounds(self, control: Any) -> None:
        should_log = control.should_log  # which the trainer's `log` would take for done
        for report in self._reports:
            self._trainer.log(round_figures(report))
        self._reports.clear()
        control.should_log = should_log


def round_figures(report: RoundReport) -> dict[str, float]:
    """What a trainer's log, which takes numbers only, says about one attempt at a round."""
    outcome = report.outcome
    figures = {
        "round": report.round,
        "round_committed": int(outcome.verdict == "commit"),
        "round_workers": len(outcome.weights),
        "round_inner_s": report.inner_s,
        "round_wait_s": outcome.wait_s,
        "round_allreduce_s": outcome.allreduce_s,
        "round_outer_s": report.outer_s,
        "round_sent_bytes": outcome.sent_bytes,
        "round_received_bytes": outcome.received_bytes,
        "pseudo_gradient_norm": report.pseudo_gradient_norm,
    }
    if report.outer_gradient_norm is not None:
        figures["outer_gradient_norm"] = report.outer_gradient_norm
    return figures


def _check(trainer: Any) -> None:
    args, cure = trainer.args, "train with one process and one copy of the model a worker"
    if trainer.model_init is not None:
        raise SettingsError(
            "the trainer has a model_init, which would make another model after DiLoCo has entered the swarm with "
            "this one: give the trainer a model"
        )
    if args.world_size > 1:
        raise SettingsError(f"the trainer is one of {args.world_size} processes: {cure}")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise SettingsError(f"the trainer shards its model (FSDP or DeepSpeed): {cure}")
    if isinstance(trainer.optimizer, DiLoCo):
        raise SettingsError("the trainer is in a swarm already: make one DiLoCoCallback for each trainer")
    if args.data_seed is not None:
        raise SettingsError(
            f"data_seed is {args.data_seed}, and workers with the same one read the same data in the same order: "
            "leave it out, every worker gets one of its own"
        )
