"""One worker of each training system that bench_train compares: the same model, text, AdamW and length of a step.

See `train_worker` for the process in which it runs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.steps import Pace, Place, Text

PORT = 31337
PATIENCE_S = 120.0
"""For others that are late, in systems that give up on them otherwise."""
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo, arXiv:2311.08105: SGD with Nesterov momentum."""


class Trainer(ABC):
    """One worker of a system. Calls come in the order of the methods; `train` repeats."""

    module: nn.Module
    """What a batch goes through."""
    optimizer: torch.optim.Optimizer
    """What `join` made."""
    problem = ""
    """Of the round that `train` is in."""

    def __init__(self, place: Place, model: nn.Module, text: Text, pace: Pace) -> None:
        self.place, self.plan, self.model, self.text, self.pace = place, place.plan, model, text, pace
        self.module = model

    @abstractmethod
    def start(self, addresses: list[str]) -> list[str]:
        """Come up, through `addresses` of the first worker unless this is it; returns this worker's addresses."""

    @abstractmethod
    def join(self) -> None:
        """Wait for the others, and make the optimizer."""

    def train(self) -> None:
        """One round."""
        for _ in range(self.plan.steps):
            self.step()

    def step(self) -> None:
        """One step; the last of a round ends with the average of all workers."""
        self.pace.begin()
        batch = self.text.next()
        self.module(batch).backward()
        self.rest()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rest(self) -> None:
        """The gradients are there."""
        self.pace.rest()

    def adamw(self, parameters: Iterable[Any]) -> torch.optim.AdamW:
        """The inner optimizer."""
        return self.pace.adamw(parameters, self.plan.lr)

    def close(self) -> None:
        """Leave in order. Not needed where it only costs time: the guard ends what is left."""
        return


class OpenDiLoCoTrainer(Trainer):
    """As in examples/own_loop.py."""

    def start(self, addresses: list[str]) -> list[str]:
        from opendiloco import Swarm, SwarmConfig

        listen = (f"/ip4/{self.place.ip}/tcp/{PORT}",)
        self._stack = contextlib.ExitStack()
        swarm = Swarm.join(SwarmConfig(peers=tuple(addresses), host_maddrs=listen), Path(tempfile.gettempdir(), "peer"))
        self._swarm = self._stack.enter_context(swarm)
        return self._swarm.addresses

    def join(self) -> None:
        from opendiloco import Contract, DiLoCo, InnerConfig, RoundsConfig, RunConfig
        from opendiloco.config import OuterConfig

        contract = Contract(
            run=RunConfig(id="train", rounds=self.plan.rounds),
            inner=InnerConfig(steps=self.plan.steps),
            outer=OuterConfig.model_validate(
                {"codec": self.place.system.codec, "lr": OUTER_LR, "momentum": OUTER_MOMENTUM}
            ),
            rounds=RoundsConfig(start_peers=self.plan.workers),
        )
        inner = self.adamw(self.model.parameters())
        self.optimizer = self._stack.enter_context(
            DiLoCo(inner, self.model, self._swarm, contract, on_round=self._note)
        )

    def _note(self, report: Any) -> None:
        outcome = report.outcome
        if outcome.verdict != "commit" or len(outcome.weights) != self.plan.workers:
            self.problem += f"{outcome.verdict} of {len(outcome.weights)} workers {outcome.reason}; "

    def close(self) -> None:
        self._stack.close()


class HivemindDiLoCoTrainer(Trainer):
    """The path OpenDiLoCo takes: the pseudo-gradient through hivemind's own averager, the outer step at every worker.

    In favour of it a group is whole or none and starts at once when it is; OpenDiLoCo itself waits for matchmaking_time
    and takes who is there.
    """

    def start(self, addresses: list[str]) -> list[str]:
        self._dht = hivemind_dht(self.place.ip, addresses)
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def join(self) -> None:
        from hivemind.averaging import DecentralizedAverager
        from hivemind.compression import Float16Compression

        self.optimizer = self.adamw(self.model.parameters())
        self._theta = nn.Parameter(nn.utils.parameters_to_vector(self.model.parameters()).detach().clone())
        self._outer = torch.optim.SGD([self._theta], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self._averager = DecentralizedAverager(
            [torch.zeros_like(self._theta.data)],
            self._dht,
            start=True,
            prefix="train",
            target_group_size=self.plan.workers,
            min_group_size=self.plan.workers,
            compression=Float16Compression(),
            allow_state_sharing=False,
        )

    def train(self) -> None:
        super().train()
        with torch.no_grad(), self._averager.get_tensors() as (tensor,):
            torch.sub(self._theta, nn.utils.parameters_to_vector(self.model.parameters()), out=tensor)
        group = self._averager.step(timeout=PATIENCE_S)
        if group is None or len(group) != self.plan.workers:
            self.problem = f"a group of {len(group or ())}"
        with torch.no_grad(), self._averager.get_tensors() as (tensor,):
            self._theta.grad = tensor.clone()
        self._outer.step()
        nn.utils.vector_to_parameters(self._theta.data.clone(), self.model.parameters())  # which become views of it


class HivemindTrainer(Trainer):
    """`hivemind.Optimizer`, synchronous. A round is as many of its epochs as others do steps.

    In favour of it groups start when they are whole, others are looked for often at the start, and what it recommends
    is set: fp16 on the wire, and parameters averaged now and then, here once a round, in the background. While it waits
    for the others a worker computes further batches of the same epoch; they count as tokens.
    """

    def start(self, addresses: list[str]) -> list[str]:
        self._dht = hivemind_dht(self.place.ip, addresses)
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def join(self) -> None:
        from hivemind import Optimizer
        from hivemind.compression import Float16Compression
        from hivemind.optim.grad_averager import GradientAverager

        self._epochs = 0
        whole = {"target_group_size": self.plan.workers}
        self.optimizer = self._hivemind = Optimizer(
            dht=self._dht,
            run_id="train",
            target_batch_size=self.plan.workers * self.plan.batch,
            batch_size_per_step=self.plan.batch,
            params=self.model.parameters(),
            optimizer=self.adamw,
            matchmaking_time=5.0,
            averaging_timeout=PATIENCE_S / 2,
            grad_compression=Float16Compression(),
            state_averaging_compression=Float16Compression(),
            average_state_every=self.plan.steps,
            grad_averager_factory=partial(GradientAverager, **whole),
            averager_opts=whole,
            tracker_opts={"default_refresh_period": 0.5},
        )

    def train(self) -> None:
        self._epochs += self.plan.steps
        while self._hivemind.local_epoch < self._epochs:
            self.step()


class TorchftTrainer(Trainer):
    """torchft's DiLoCo as it comes: a lighthouse on the first worker's host, a manager each, gloo, all values fp32."""

    def start(self, addresses: list[str]) -> list[str]:
        if not addresses:
            from torchft.coordination import LighthouseServer

            self._lighthouse = LighthouseServer(bind=f"{self.place.ip}:{PORT}", min_replicas=self.plan.workers)
        self._address = addresses[0] if addresses else f"http://{self.place.ip}:{PORT}"
        return [self._address]

    def join(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        self._store = TCPStore(self.place.ip, 0, is_master=True, wait_for_workers=False)
        patience = timedelta(seconds=PATIENCE_S)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=patience),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=self.plan.workers,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=patience,
            rank=0,
            world_size=1,
            store_addr=self.place.ip,
            store_port=self._store.port,
            lighthouse_addr=self._address,
            replica_id=f"worker_{self.place.index}",
            hostname=self.place.ip,
            init_sync=False,
        )
        self.optimizer = self.adamw(self.model.parameters())
        outer = torch.optim.SGD(self.model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self._diloco = DiLoCo(self._manager, [self.model], self.optimizer, outer, sync_every=self.plan.steps)
        self._diloco.__enter__()

    def train(self) -> None:
        before = self._manager.current_step()
        super().train()
        if self._manager.current_step() != before + 1 or self._manager.num_participants() != self.plan.workers:
            self.problem = f"step {before}, then {self._manager.current_step()}"


class DDPTrainer(Trainer):
    """torch.distributed over gloo: gradients as fp32, averaged while the backward pass still runs."""

    def start(self, addresses: list[str]) -> list[str]:
        self._address = addresses[0] if addresses else f"tcp://{self.place.ip}:{PORT}"
        return [self._address]

    def join(self) -> None:
        from torch import distributed

        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        distributed.init_process_group(
            "gloo",
            init_method=self._address,
            rank=self.place.index,
            world_size=self.plan.workers,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        self.module = module = nn.parallel.DistributedDataParallel(self.model, broadcast_buffers=False)

        # a lambda: DDP compares annotations, which are strings here
        module.register_comm_hook(None, lambda _, bucket: self._average(bucket))
        self.optimizer = self.adamw(self.model.parameters())

    def rest(self) -> None:
        return  # done before the last bucket left

    def _average(self, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        if bucket.is_last():  # the backward pass ends here; the buckets before are on their way
            self.pace.rest()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]


TRAINERS: dict[str, type[Trainer]] = {
    "opendiloco": OpenDiLoCoTrainer,
    "hivemind DiLoCo": HivemindDiLoCoTrainer,
    "torchft DiLoCo": TorchftTrainer,
    "hivemind.Optimizer": HivemindTrainer,
    "gloo DDP": DDPTrainer,
}


def hivemind_dht(ip: str, addresses: list[str]) -> Any:
    """A peer of hivemind's network on this host."""
    from hivemind import DHT
    from hivemind.p2p import P2P

    P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/"
    return DHT(initial_peers=addresses, host_maddrs=[f"/ip4/{ip}/tcp/{PORT}"], start=True)
