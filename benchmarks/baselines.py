"""One peer of each system that bench_allreduce compares: opendiloco, hivemind's own averager, gloo.

`python -m benchmarks.baselines DESCRIPTOR` is one peer process; the benchmark calls its methods over the socket.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import CALL_LIMIT_S, answer_calls
from opendiloco.shared import map_vectors

STAGE_POLL_S = 0.002
MATCHMAKING_S = 20.0
"""Of hivemind, before it begins anew, as a program that uses it would; the time counts."""
PATIENCE_S = 60.0
"""On a machine with other work to do nobody counts as dropped too soon: a sample is one of the whole group."""
NO_HASH = "0" * 64


@dataclass(frozen=True)
class System:
    """What is measured: an implementation, and how its values travel."""

    name: str
    codec: str

    @property
    def label(self) -> str:
        """The system in a table."""
        return f"{self.name} {self.codec}"


@dataclass(frozen=True)
class Place:
    """Which peer of which group a process is."""

    system: System
    index: int
    workers: int
    values: int
    memory: int
    """Descriptor of the memory with everybody's values and results (see `vector_sizes`)."""


@dataclass(frozen=True)
class Timing:
    """One all-reduce at one peer; times on the machine's monotonic clock."""

    gathered: float
    """When the group was complete; with a fixed membership it is so from the beginning."""
    ended: float
    sent_bytes: int | None
    """Counted by the system itself; None when it does not count."""
    problem: str = ""
    """Why this is no average of the whole group, if so."""


def vector_sizes(workers: int, values: int) -> dict[str, int]:
    """Vectors shared by the benchmark and all peers."""
    return {f"{kind} {index}": values for kind in ("values", "result") for index in range(workers)}


class Peer(ABC):
    """One peer of a system. Calls come in the order of the methods; `run` and `finish` repeat."""

    vector: Tensor
    """This peer's values; what `join` returned."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def start(self, addresses: list[str]) -> list[str]:
        """Come up, through `addresses` of the first peer unless this is it; returns this peer's addresses."""

    @abstractmethod
    def join(self) -> Tensor:
        """Wait for the others; returns the vector to average, in which the average is found afterwards."""

    @abstractmethod
    def run(self) -> Timing:
        """One all-reduce."""

    def average(self) -> Tensor:
        """Where the average is."""
        return self.vector

    def finish(self) -> None:
        """What a trainer does after a round, apart from the all-reduce; nothing, unless a system needs it."""
        return

    def close(self) -> None:
        """Leave in order. Not needed where it only costs time: the guard ends what is left."""
        return


class OpenDiLoCoPeer(Peer):
    """A worker's `Swarm` without a model: rendezvous, all-reduce, announcement of the commit."""

    def start(self, addresses: list[str]) -> list[str]:
        from opendiloco.config import SwarmConfig
        from opendiloco.swarm import Swarm

        config = SwarmConfig(peers=tuple(addresses), startup_timeout_s=PATIENCE_S, expiry_s=PATIENCE_S)
        self._swarm = Swarm(config, Path(tempfile.gettempdir(), "peer"))
        self._swarm.open()
        return self._swarm.addresses

    def join(self) -> Tensor:
        from opendiloco import averager
        from opendiloco.codec import get_codec
        from opendiloco.config import Contract, OuterConfig, RoundsConfig
        from opendiloco.rounds import Position

        contract = Contract(
            rounds=RoundsConfig(start_peers=self.place.workers, grace=PATIENCE_S, failure_timeout_s=PATIENCE_S),
            outer=OuterConfig.model_validate({"codec": self.place.system.codec}),
        )
        vectors = self._swarm.allocate(averager.vector_sizes(self.place.values, contract))
        self._codec = get_codec(contract.outer.codec)
        self._average, self._contribution = vectors["average"], averager.contribution_bytes(vectors, self._codec)
        self._position = Position(0, NO_HASH, NO_HASH)
        self._swarm.enter(contract, NO_HASH, self._position)
        self._swarm.wait_for_start().result(CALL_LIMIT_S)
        return torch.empty(self.place.values)

    def run(self) -> Timing:
        from opendiloco.rounds import RoundRequest

        began = time.monotonic()
        self._codec.encode(self.vector, self._contribution)
        encoded = time.monotonic()
        outcome = self._swarm.average(RoundRequest(weight=1.0, tokens=1)).result(CALL_LIMIT_S)
        ended = time.monotonic()
        self._lineage, self._tokens = outcome.lineage, sum(outcome.tokens.values())
        whole = outcome.verdict == "commit" and len(outcome.weights) == self.place.workers
        problem = "" if whole else f"{outcome.verdict} of {len(outcome.weights)} peers ({outcome.reason})"
        rendezvous_s = ended - encoded - outcome.allreduce_s
        return Timing(began + rendezvous_s, ended, outcome.sent_bytes, problem)  # encoding counts as all-reduce

    def average(self) -> Tensor:
        return self._average

    def finish(self) -> None:
        from opendiloco.rounds import Position

        before = self._position
        self._position = Position(before.round + 1, self._lineage, "", before.tokens + self._tokens)
        self._swarm.committed(self._position)

    def close(self) -> None:
        self._swarm.close()


class HivemindPeer(Peer):
    """`DecentralizedAverager` as it comes; whole groups only, and one as large as the swarm starts at once."""

    def start(self, addresses: list[str]) -> list[str]:
        from hivemind import DHT
        from hivemind.p2p import P2P

        P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/"
        self._dht = DHT(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def join(self) -> Tensor:
        from hivemind.averaging import DecentralizedAverager
        from hivemind.compression import Float16Compression, NoCompression

        vector = torch.zeros(self.place.values)
        self._averager = DecentralizedAverager(
            [vector],
            self._dht,
            start=True,
            prefix="benchmark",
            target_group_size=self.place.workers,
            min_group_size=self.place.workers,
            compression=Float16Compression() if self.place.system.codec == "fp16" else NoCompression(),
            allow_state_sharing=False,
        )
        return vector

    def run(self) -> Timing:
        from hivemind.averaging.partition import AllreduceException

        give_up = time.monotonic() + CALL_LIMIT_S / 2
        while True:
            try:
                return self._step()
            except AllreduceException:  # now and then its matchmaking finds nobody, and would not for a minute
                if time.monotonic() > give_up:
                    raise

    def _step(self) -> Timing:
        from hivemind.averaging.control import AveragingStage

        step = self._averager.step(wait=False, timeout=MATCHMAKING_S)
        while step.stage in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP, AveragingStage.AWAITING_TRIGGER):
            time.sleep(STAGE_POLL_S)
        gathered = time.monotonic()
        group = step.result()
        ended = time.monotonic()
        if len(group) != self.place.workers:
            raise RuntimeError(f"a group of {len(group)}")
        return Timing(gathered, ended, None)


class GlooPeer(Peer):
    """torch.distributed: no encryption, fixed membership, fp32."""

    def start(self, addresses: list[str]) -> list[str]:
        self._store = addresses[0] if addresses else f"file://{tempfile.gettempdir()}/store"
        return [self._store]

    def join(self) -> Tensor:
        from torch import distributed

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        distributed.init_process_group(
            "gloo",
            init_method=self._store,
            rank=self.place.index,
            world_size=self.place.workers,
            timeout=timedelta(seconds=CALL_LIMIT_S),
        )
        return torch.zeros(self.place.values)

    def run(self) -> Timing:
        from torch import distributed

        started = time.monotonic()
        distributed.all_reduce(self.vector)
        self.vector.div_(self.place.workers)
        return Timing(started, time.monotonic(), None)


class PeerCalls:
    """What the benchmark calls in a peer process."""

    def place(self, place: Place) -> None:
        """Become a peer."""
        kinds: dict[str, type[Peer]] = {"opendiloco": OpenDiLoCoPeer, "hivemind": HivemindPeer, "gloo": GlooPeer}
        self._peer = kinds[place.system.name](place)
        shared = map_vectors(place.memory, vector_sizes(place.workers, place.values))
        self._values, self._result = shared[f"values {place.index}"], shared[f"result {place.index}"]

    def start(self, addresses: list[str]) -> list[str]:
        """Come up; returns addresses for the others."""
        return self._peer.start(addresses)

    def join(self) -> None:
        """Wait for the others."""
        self._peer.vector = self._peer.join()

    def reset(self) -> None:
        """Take this peer's values, and forget the last average."""
        self._peer.average().zero_()
        self._peer.vector.copy_(self._values)

    def run(self, start_at: float) -> Timing:
        """One all-reduce, from the moment `start_at` of the machine's monotonic clock."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        return self._peer.run()

    def publish(self) -> None:
        """Hand the average to the benchmark."""
        self._result.copy_(self._peer.average())
        self._peer.finish()

    def close(self) -> None:
        """Leave."""
        if hasattr(self, "_peer"):
            self._peer.close()


def main() -> None:
    """Entry point: the socket's descriptor is the argument."""
    calls = PeerCalls()
    answer_calls(Connection(int(sys.argv[1])), calls)
    try:
        calls.close()
    finally:
        os._exit(0)  # hivemind's processes are not waited for: the guard ends them


if __name__ == "__main__":
    from benchmarks import baselines  # under its own name: what it sends is unpickled in another process

    baselines.main()
