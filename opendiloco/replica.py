"""A worker's model and inner optimizer, and what its other processes (see `ranks`) do with theirs."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from opendiloco.config import ComputeConfig, Contract
from opendiloco.errors import SwarmError
from opendiloco.flat import trainable_parameters
from opendiloco.inner import choose_device, inner_step, make_inner_optimizer
from opendiloco.model import build_model
from opendiloco.ranks import End, Prepare, Ranks, Step, TakeOptimizer, TakeParameters
from opendiloco.separation import check_separation


@dataclass(frozen=True)
class Replica:
    """A model on its device, ready to be trained."""

    model: PreTrainedModel
    trained: nn.Module
    """The module whose forward and backward pass train the model: all processes of the worker together."""
    inner: torch.optim.Optimizer
    device: torch.device


def build_replica(
    contract: Contract, compute: ComputeConfig, *, vocab_size: int, end_id: int | None, ranks: Ranks
) -> Replica:
    """The replica before the first step: the same in every process, as far as the model's parameters are.

    Args:
        end_id: last token of each document, where documents are to be kept apart.
    """
    device = choose_device(ranks.own_device(compute))
    model = build_model(
        contract.model, vocab_size=vocab_size, seq_len=contract.data.seq_len, seed=contract.run.seed
    ).to(device)
    if end_id is not None:
        check_separation(model, end_id, name=contract.model.name)
    return Replica(model, ranks.wrap(model), make_inner_optimizer(model, contract.inner), device)


def assist(ranks: Ranks) -> int:
    """Be one of a worker's other processes until the first one ends; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        with ranks:
            ranks.open()
            for number in (signal.SIGINT, signal.SIGTERM):  # the first process leaves in order, and needs the others
                signal.signal(number, signal.SIG_IGN)
            _follow_orders(ranks)
    except SwarmError:
        return SwarmError.exit_code  # the first process says why
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
                with ranks.together():
                    inner_step(
                        replica.trained,
                        replica.inner,
                        tokens,
                        config=contract.inner,
                        lr=lr,
                        micro_batch_size=compute.micro_batch_size,
                        precision=compute.precision,
                        end_id=prepare.end_id,
                    )
            case TakeParameters():
                ranks.hand_out(parameters)
            case TakeOptimizer(state=state):
                replica.inner.load_state_dict(state)
            case End() | Prepare():
                return
