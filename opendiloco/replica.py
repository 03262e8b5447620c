"""A worker's model and inner optimizer, and what its other processes (see `ranks`) do with theirs."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from opendiloco.compute import choose_device, move_model
from opendiloco.config import ComputeConfig, Contract
from opendiloco.errors import SwarmError
from opendiloco.flat import trainable_parameters
from opendiloco.inner import InnerSteps
from opendiloco.leave import run
from opendiloco.model import build_model
from opendiloco.optimizers import make_inner_optimizer
from opendiloco.ranks import End, Prepare, Ranks, Step, TakeOptimizer, TakeParameters
from opendiloco.separation import check_separation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replica:
    """A model on its device, ready to be trained."""

    model: PreTrainedModel
    inner: torch.optim.Optimizer
    steps: InnerSteps


def build_replica(
    contract: Contract,
    compute: ComputeConfig,
    *,
    vocab_size: int,
    end_id: int | None,
    ranks: Ranks,
    leaving: Callable[[], bool] = lambda: False,
) -> Replica:
    """The replica before the first step: the same in every process, as far as the model's parameters are.

    Args:
        end_id: last token of each document, where documents are to be kept apart.
        leaving: whether the user wants to leave, while the compiler works.

    Raises:
        SettingsError: a model, device or optimizer that cannot be had.
    """
    device, seq_len = choose_device(ranks.own_device(compute)), contract.data.seq_len
    ranks.use(device)
    model = build_model(contract.model, vocab_size=vocab_size, seq_len=seq_len, seed=contract.run.seed)
    move_model(model, device, name=contract.model.name)
    if end_id is not None:
        check_separation(model, end_id, name=contract.model.name)
    inner = make_inner_optimizer(model, contract.inner)
    steps = InnerSteps(
        model, contract.inner, compute, trained=ranks.wrap(model), together=ranks.together, end_id=end_id
    )
    if compute.compile:  # takes minutes, for which nobody shall wait in a round
        if ranks.is_first:
            logger.info("compiling the model (compute.compile), which takes some minutes")
        run(lambda: steps.compile(seq_len), leaving, name="compiling")
    return Replica(model, inner, steps)


def assist(ranks: Ranks) -> int:
    """Be one of a worker's other processes until the first one ends; returns the exit code.

    Raises:
        OpendilocoError: this process cannot go on; the first one sees that it has ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        with ranks:
            ranks.open()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # the first process leaves in order, and needs the others
            _follow_orders(ranks)
    except SwarmError as error:
        logger.warning("process %d of this worker ends: %s", ranks.index, error)
        return SwarmError.exit_code
    return 0


def _follow_orders(ranks: Ranks) -> None:
    prepare = ranks.take()
    assert isinstance(prepare, Prepare)
    contract, compute = prepare.contract, prepare.compute
    replica = build_replica(contract, compute, vocab_size=prepare.vocab_size, end_id=prepare.end_id, ranks=ranks)
    parameters = trainable_parameters(replica.model)
    while True:
        match ranks.take():
            case Step(tokens=tokens, lr=lr):
                replica.steps.step(replica.inner, tokens, lr=lr)
            case TakeParameters():
                ranks.hand_out(parameters)
            case TakeOptimizer(state=state):
                replica.steps.restore(replica.inner, state)
            case End() | Prepare():
                return
