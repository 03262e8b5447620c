"""One worker process of bench_train, whatever its system: `python -m benchmarks.train_worker DESCRIPTOR`.

The benchmark calls its methods over the socket.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection

import torch
from torch import nn

from benchmarks.common import answer_calls
from benchmarks.llama import Llama
from benchmarks.steps import Lap, Pace, Place, State, Text
from benchmarks.trainers import TRAINERS


class WorkerCalls:
    """What the benchmark calls in a worker process."""

    def place(self, place: Place) -> int:
        """Become a worker; returns the number of parameters."""
        self._text, self._pace = Text(place.plan, place.index), Pace(place.plan.step_s)
        plan = place.plan
        self._model = Llama(hidden=plan.hidden, layers=plan.layers, seq_len=plan.seq_len)
        self._trainer = TRAINERS[place.system.name](place, self._model, self._text, self._pace)
        return sum(parameter.numel() for parameter in self._model.parameters())

    def start(self, addresses: list[str]) -> list[str]:
        """Come up; returns addresses for the others."""
        return self._trainer.start(addresses)

    def join(self) -> None:
        """Wait for the others."""
        self._trainer.join()

    def train(self, start_at: float) -> Lap:
        """One round, from the moment `start_at` of the machine's monotonic clock."""
        self._pace.reset()
        self._trainer.problem, before = "", self._text.batches
        time.sleep(max(0.0, start_at - time.monotonic()))
        self._trainer.train()
        return Lap(
            ended=time.monotonic(),
            inner_s=self._pace.inner_s,
            compute_s=self._pace.compute_s,
            batches=self._text.batches - before,
            problem=self._trainer.problem,
        )

    def look(self, evaluates: bool) -> State:
        """At the parameters as they are now."""
        from blake3 import blake3

        flat = nn.utils.parameters_to_vector(self._model.parameters()).detach()
        return State(blake3(flat.view(torch.uint8).numpy().data).hexdigest(), self._loss() if evaluates else None)

    def close(self) -> None:
        """Leave."""
        if hasattr(self, "_trainer"):
            self._trainer.close()

    @torch.no_grad()
    def _loss(self) -> float:
        batches = torch.split(self._text.held_out, 64)
        losses = [float(self._model(batch)) * len(batch) for batch in batches]
        return sum(losses) / len(self._text.held_out)


def main() -> None:
    """Entry point: the socket's descriptor is the argument."""
    torch.set_num_threads(1)
    calls = WorkerCalls()
    answer_calls(Connection(int(sys.argv[1])), calls)
    try:
        calls.close()
    finally:
        os._exit(0)  # hivemind's processes are not waited for: the guard ends them


if __name__ == "__main__":
    from benchmarks import train_worker  # under its own name: what it sends is unpickled in another process

    train_worker.main()
