"""The processes of one worker, started by torchrun: the first is the worker, the others compute a share of each batch.

Only the first one knows the swarm, the text and the outer state; it gives the orders. All hold the same parameters and
inner optimizer, because the gradient that each applies is that of the whole batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from opendiloco.checkpoint import copy_to_host
from opendiloco.compute import is_lost_process
from opendiloco.config import ComputeConfig, Contract
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.launcher import BEGAN, tell_keeper
from opendiloco.leave import Leave, wait_for

JOIN_LIMIT = timedelta(minutes=5)
"""For all processes to come up, and for one that is stuck in a step."""
ORDER_LIMIT = timedelta(days=365)
"""Between two orders: a round may wait for the swarm as long as it takes."""
ANSWER_S = 4.0
"""For what all processes are doing when the worker is asked to leave."""
END_S = 1.0
"""For a process to end when the first one does not wait for it any longer; then it is killed."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepare:
    """Build the replica."""

    contract: Contract
    compute: ComputeConfig
    vocab_size: int
    end_id: int | None
    """Last token of each document, where documents are to be kept apart."""


@dataclass(frozen=True)
class Step:
    """Do an inner step."""

    tokens: Tensor
    """int64 [batch, seq_len]: the whole batch."""
    lr: float


@dataclass(frozen=True)
class TakeParameters:
    """The parameters have been replaced: the first process hands out its own."""


@dataclass(frozen=True)
class TakeOptimizer:
    """The inner optimizer's state has been replaced."""

    state: dict[str, Any]


@dataclass(frozen=True)
class End:
    """The worker has ended."""


Order = Prepare | Step | TakeParameters | TakeOptimizer | End


class Ranks:
    """The processes of this worker as one of them sees them; a worker without torchrun is one process."""

    def __init__(self, index: int = 0, size: int = 1, local_index: int = 0) -> None:
        self.index, self.size, self._local_index = index, size, local_index
        self._control: Any = None
        self._leaving: Callable[[], bool] = lambda: False
        self._others: dict[int, int] = {}
        """pidfds of the other processes on this machine, which only the first one has."""
        self._others_answer = True
        self._thread = ThreadPoolExecutor(1, "ranks")
        """Where the first process waits for the others: signals must find its main thread awake."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """What torchrun says in its environment variables."""
        size = int(environment.get("WORLD_SIZE", "1"))
        if size == 1 or "RANK" not in environment:
            return cls()
        return cls(int(environment["RANK"]), size, int(environment.get("LOCAL_RANK", "0")))

    @property
    def is_first(self) -> bool:
        """Whether this process is the worker."""
        return self.index == 0

    def open(self, leaving: Callable[[], bool] = lambda: False) -> None:
        """Wait for all processes.

        Args:
            leaving: whether the user wants to leave, from now on.

        Raises:
            SwarmError: one of them does not come.
        """
        self._leaving = leaving
        if self.size > 1 and self._control is None:
            self._control = self.together(self._meet)

    def _meet(self) -> Any:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, timeout=JOIN_LIMIT)
        control = distributed.new_group(backend="gloo", timeout=ORDER_LIMIT)
        here = socket.gethostname()
        places: list[Any] = [None] * self.size
        distributed.all_gather_object(places, (here, os.getpid()), group=control)
        if self.is_first:
            with contextlib.suppress(ProcessLookupError):  # the next order says that it has ended
                for index, (host, pid) in enumerate(places[1:], start=1):
                    if host == here:
                        self._others[index] = os.pidfd_open(pid)
        return control

    def give(self, order: Order) -> None:
        """Have the other processes do something; they do so at once, and wait for the next order then."""
        if self._control is None:
            return
        if isinstance(order, TakeOptimizer):  # a tensor of a GPU would arrive on that GPU, in all processes
            order = TakeOptimizer(copy_to_host(order.state))
        self.together(lambda: distributed.broadcast_object_list([order], src=0, group=self._control))

    def take(self) -> Order:
        """The first process's next order."""
        received: list[Any] = [None]
        self.together(lambda: distributed.broadcast_object_list(received, src=0, group=self._control))
        order: Order = received[0]
        return order

    def own_device(self, compute: ComputeConfig) -> ComputeConfig:
        """Settings in which each process has a GPU of its own, where there are GPUs."""
        if self.size == 1 or compute.device == "cpu" or not torch.cuda.is_available():
            return compute
        if compute.device.startswith("cuda:"):
            raise SettingsError(
                f"compute.device is {compute.device} and this worker has {self.size} processes: set it to cuda, so "
                "that each of them takes a GPU of its own"
            )
        return compute.model_copy(update={"device": f"cuda:{self._local_index}"})

    def use(self, device: torch.device) -> None:
        """Make a GPU the current one, also of the thread that speaks with the others: else it would be the first."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._thread.submit(torch.cuda.set_device, device).result()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to train with: its gradients are those of the whole batch."""
        return self.together(lambda: DistributedDataParallel(model)) if self.size > 1 else model

    def hand_out(self, parameters: Sequence[Tensor]) -> None:
        """Give all processes the first one's parameters; all call this."""

        def broadcast() -> None:
            with torch.no_grad():
                for parameter in parameters:
                    distributed.broadcast(parameter, src=0)

        if self._control is not None:
            self.together(broadcast)

    def together(self, function: Callable[[], T]) -> T:
        """What `function`, which needs all processes, returns.

        Raises:
            Leave: the user wants to leave, and a process does not answer: there are no others from then on.
            SwarmError: one of them has ended. Errors of this process stay what they are.
        """
        if self.size == 1:
            return function()
        try:
            return self._await(self._thread.submit(function)) if self.is_first else function()
        except RuntimeError as error:
            if not is_lost_process(error):
                raise
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = re.sub(r"^\[\S+\] ", "", first_line).partition(". ")[0][:200]  # without gloo's own file
            raise SwarmError(
                f"another of this worker's {self.size} processes has ended ({reason}): see its last lines, then start "
                "this worker again"
            ) from error

    def _await(self, future: Future[T]) -> T:
        give_up: float | None = None

        def is_hopeless() -> bool:
            nonlocal give_up
            if give_up is None and self._leaving():
                give_up = time.monotonic() + ANSWER_S
            return give_up is not None and time.monotonic() > give_up

        try:
            return wait_for(future, is_hopeless)
        except Leave:
            self._control, self._others_answer = None, False
            logger.warning(
                "this worker's other %d processes do not answer within %g s: leaving without", self.size - 1, ANSWER_S
            )
            raise

    def _end_others(self) -> None:
        """End those that were left without an order to end, and kill those that do not even do that."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if self._others else ():
            signal.signal(number, signal.SIG_IGN)  # torchrun asks this process to end as soon as another one has
        for other in self._others.values():
            _send(other, signal.SIGUSR1)
        give_up, silent = time.monotonic() + END_S, []
        for index, other in self._others.items():
            if not select.select([other], [], [], max(0.0, give_up - time.monotonic()))[0]:
                silent.append(str(index))
                _send(other, signal.SIGKILL)
        if silent:
            logger.warning("killed process %s of this worker, which did not answer", ", ".join(silent))

    def __enter__(self) -> Self:
        if self.is_first:
            tell_keeper(BEGAN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None or issubclass(kind, Leave):
                self._end()  # else in the middle of something: the others notice that this process ends
        finally:
            self._thread.shutdown(wait=self._others_answer)

    def _end(self) -> None:
        if self.is_first:
            with contextlib.suppress(SwarmError, Leave):  # of those that have ended already
                self.give(End())
        if self._control is not None:
            distributed.destroy_process_group()
        else:
            self._end_others()


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def check_batch(contract: Contract, ranks: Ranks) -> None:
    """Raise SettingsError unless a batch can be divided among the processes of a worker."""
    if contract.inner.batch_size % ranks.size:
        raise SettingsError(
            f"inner.batch_size is {contract.inner.batch_size} and this worker has {ranks.size} processes: start a "
            "number of them that divides it (torchrun --nproc_per_node)"
        )
