"""What all training systems that bench_train compares do alike: model, text, AdamW, the length of a step.

It also has what the benchmark and its worker processes tell each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class System:
    """What is measured: an implementation, and how its values travel."""

    name: str
    codec: str
    averages: str
    """What travels: "phases", once a round, or "gradients", at every step."""

    @property
    def label(self) -> str:
        """The system in a table."""
        return f"{self.name} {self.codec}"


@dataclass(frozen=True)
class Plan:
    """What all workers of all systems do alike."""

    workers: int
    rounds: int
    steps: int
    """Of a round: inner steps, or those of a system that averages at every step."""
    batch: int
    """Sequences of a worker's step."""
    seq_len: int
    held_out: int
    """Sequences that nobody trains on."""
    hidden: int
    layers: int
    lr: float
    step_s: float
    """A step that computes for a shorter time pauses for the rest."""
    memory: int
    """Descriptor of the text: bytes."""

    @property
    def batch_tokens(self) -> int:
        """Of a worker's step."""
        return self.batch * self.seq_len

    @property
    def batches(self) -> int:
        """Of all workers in all rounds."""
        return self.workers * self.rounds * self.steps


@dataclass(frozen=True)
class Place:
    """Which worker of which system a process is."""

    system: System
    plan: Plan
    index: int
    ip: str


@dataclass(frozen=True)
class Lap:
    """One round at one worker."""

    ended: float
    """On the machine's monotonic clock."""
    inner_s: float
    """Of it in steps: forward, backward, AdamW and pauses."""
    compute_s: float
    """The same without pauses."""
    batches: int
    problem: str = ""
    """Why this is no average of all workers, if so."""


@dataclass(frozen=True)
class State:
    """What a worker's parameters are between two rounds."""

    params_hash: str
    loss: float | None
    """On the held-out sequences, if that was asked for."""


class Text:
    """The sequences of one worker, in an order of their own that is the same for all systems; and the held-out ones."""

    def __init__(self, plan: Plan, index: int) -> None:
        path = f"/proc/self/fd/{plan.memory}"
        tokens = torch.from_file(path, size=os.stat(path).st_size, dtype=torch.uint8)
        sequences = tokens[: len(tokens) // plan.seq_len * plan.seq_len].view(-1, plan.seq_len)
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
        self.held_out = sequences[order[: plan.held_out]].long()
        self._sequences, self._order = sequences, order[plan.held_out :][index :: plan.workers]
        self._batch, self.batches = plan.batch, 0

    def next(self) -> Tensor:
        """Tokens [batch, seq_len] of the next step; from the start again after the last."""
        places = torch.arange(self.batches * self._batch, (self.batches + 1) * self._batch) % len(self._order)
        self.batches += 1
        return self._sequences[self._order[places]].long()


class Pace:
    """The time of a round that is spent in steps, each of them at least `step_s` long.

    Workers that share cores would otherwise compute for longer the more of them do so at once, and the less, the more
    they wait for the network: a pause makes each a machine of its own, as long as the cores are fast enough.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s, self._update_s = step_s, 0.0
        self.reset()

    def reset(self) -> None:
        """A new round."""
        self.inner_s = self.compute_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def rest(self) -> None:
        """All of a step but the update is done: pause for what is left of its time."""
        computed_s = time.monotonic() - self._began
        time.sleep(max(0.0, self._step_s - computed_s - self._update_s))
        self.compute_s += computed_s
        self.inner_s += time.monotonic() - self._began

    def adamw(self, parameters: Iterable[Any], lr: float) -> torch.optim.AdamW:
        """The inner optimizer, whose updates belong to the steps."""
        optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.begin())
        optimizer.register_step_post_hook(lambda *_: self._updated())
        return optimizer

    def _updated(self) -> None:
        self._update_s = time.monotonic() - self._began
        self.compute_s += self._update_s
        self.inner_s += self._update_s
