"""What an optimizer around another one must do so that somebody's own training loop stays as it is."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from opendiloco.config import Contract
from opendiloco.errors import SwarmError
from opendiloco.leave import Leave
from opendiloco.schedule import LRScheduler, align

logger = logging.getLogger(__name__)


class LoopOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer around an inner one, with its parameter groups and state.

    A `with` block around the training loop ends it in order: after it the model holds the outer parameters, and
    within it a request to leave makes `is_done` true. Without the block, such a request raises `Leave` where the
    worker waits, and `finish` and `write_outer_parameters` are the caller's to call.
    """

    def __init__(self, inner: torch.optim.Optimizer, contract: Contract, *, leaving: Callable[[], bool]) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state
        self._contract, self._leaving = contract, leaving
        self._schedulers: list[LRScheduler] = []
        self._is_block = self._has_left = False

    @property
    def is_done(self) -> bool:
        """Whether to end the training loop: the run's last round is committed, or the user asked to leave."""
        return self.has_left or self.round >= self._contract.run.rounds

    @property
    def has_left(self) -> bool:
        """Whether the user asked to leave."""
        return self._has_left

    @property
    def total_steps(self) -> int:
        """Inner steps of the whole run, for a learning rate's schedule."""
        return self._contract.run.rounds * self._contract.inner.steps

    @property
    @abstractmethod
    def round(self) -> int:
        """Outer rounds committed."""

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Inner steps that the swarm has behind it, from 0 to `total_steps`."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One inner step; the last one of a round also ends the round with the swarm.

        Raises:
            SettingsError: outer.weighting is tokens, and nobody counted any.
            SwarmError: the round failed more often than the contract allows, or the swarm could not be caught up with.
            Leave: the user asked to leave while this worker waited for the swarm; or `is_done` was true before.
        """
        if self.is_done:
            raise Leave("no step is left to do, the training ends here: loop while not optimizer.is_done")
        loss = None
        try:
            loss = self._step(closure)
        except Leave:
            if not self._is_block:
                raise
            self._has_left = True
        except SwarmError:
            if not self._leaving():
                raise
            if not self._is_block:
                raise Leave from None  # whoever asked this process to end may have ended the network process as well
            self._has_left = True
        if self._is_block and (self._has_left or self._leaving()):
            self._has_left = True
            self.write_outer_parameters()
        for scheduler in self._schedulers:
            align(scheduler, self.global_step)
        return loss

    @abstractmethod
    def _step(self, closure: Callable[[], float] | None) -> float | None:
        """One inner step, and what follows from it."""

    def drive(self, scheduler: LRScheduler) -> None:
        """Have `scheduler` stand at the global inner step from now on, where a joiner does not begin at 0.

        It is stepped after every inner step; the training loop need not do that.
        """
        self._schedulers.append(scheduler)
        align(scheduler, self.global_step)

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @abstractmethod
    def write_outer_parameters(self) -> None:
        """Put theta, the outer parameters of the last committed round, into the model."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the last round has been hashed."""

    def __enter__(self) -> Self:
        self._is_block = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self.finish()
        self.write_outer_parameters()
        if isinstance(error, Leave) and str(error) and not self.has_left:
            logger.warning("%s", error)
        return isinstance(error, Leave)
