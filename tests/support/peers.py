"""Peers whose network side runs in a thread of this process.

libp2p daemon, DHT node, rendezvous and all-reduce are real, only the process boundary to the trainer is missing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
import uvloop
from torch import Tensor

from opendiloco.averager import contribution_bytes, vector_sizes
from opendiloco.codec import get_codec
from opendiloco.config import Contract, OuterConfig, RoundsConfig, RunConfig, SwarmConfig
from opendiloco.identity import Identity
from opendiloco.ledger import Reading
from opendiloco.outer import OuterState, outer_step, params_hash
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.shared import create_shared_memory, map_vectors
from support.waiting import LIMIT_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own, when it is imported
    from opendiloco.network import PeerProcess

T = TypeVar("T")

ZERO = "0" * 64

IGNORED_WARNINGS = (
    "ignore:path is deprecated:DeprecationWarning",  # hivemind starts its daemon with an old importlib.resources
    # a peer of this process that ends leaves its streams to the garbage collector, as the end of a process would
    "ignore:Exception ignored in. <function StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning",
    "ignore:unclosed resource <UnixTransport:ResourceWarning",  # to a daemon that was killed
)


class Peer:
    """One peer as its trainer sees it. Calls are answered in the network thread of this process."""

    def __init__(self, network: Network, folder: Path, config: SwarmConfig, identity: Identity) -> None:
        self._network, self._folder, self._memory = network, folder, create_shared_memory()
        self.peer_id = identity.peer_id
        self.process = PeerProcess(config, identity, folder, folder, self._memory)
        self.addresses: list[str] = []
        self.position = Position(0, ZERO, ZERO)
        self.vectors: dict[str, Tensor] = {}
        self.recoveries: list[Recovery] = []
        self._opening = network.start(self.process.open())
        self._closed = False

    def open(self) -> Peer:
        """Wait until this peer is on the DHT, or raise what keeps it from there."""
        self.addresses = self._opening.result(LIMIT_S)
        return self

    def enter(
        self, contract: Contract, *, size: int = 1000, position: Position | None = None, layout: str = ZERO
    ) -> None:
        """Announce this peer as a worker of the run."""
        self.position = position or self.position
        sizes = vector_sizes(size, contract)
        self.vectors = {**map_vectors(self._memory, sizes), "pseudo_gradient": torch.zeros(size)}
        self._codec = get_codec(contract.outer.codec)
        self._network.run(self.process.enter(contract, layout, sizes, self.position))

    def wait_for_start(self) -> int:
        """How many workers are there, once they are enough."""
        return self._network.run(self.process.wait_for_start())

    def average(self, weight: float = 1.0, tokens: int = 1, readings: tuple[Reading, ...] = ()) -> Future[RoundOutcome]:
        """One attempt at the round."""
        self._encode()
        return self._network.start(self.process.average(RoundRequest(weight, tokens, readings)))

    def _encode(self) -> None:
        self._codec.encode(self.vectors["pseudo_gradient"], contribution_bytes(self.vectors, self._codec))

    def lease(self, at: Reading | None) -> Reading:
        """Where this worker reads on."""
        return self._network.run(self.process.lease(at, 0, self.process._presence.contract.data.shards))

    def gathers(self, other: Peer) -> bool:
        """Whether another worker waits for its group here, and this one is to lead it."""
        rendezvous, key = self.process._participation._rendezvous, self.process._presence.outlook().key
        lobby = rendezvous._lobby
        if lobby is None or lobby.key != key or lobby.started.done() or other.peer_id not in lobby._arrivals:
            return False  # the arrivals of a round that is over are those of its group
        return rendezvous._leader(key) == self.peer_id

    @property
    def candidates(self) -> set[str]:
        """Whom it expects in its round, itself included."""
        return set(self.process._presence.outlook().candidates)

    def leased_by_others(self) -> list[int]:
        """Shards of the text that it knows to be other workers'."""
        return [shard for shards in self.process._presence.claims().values() for shard in shards]

    def commit(self, outcome: RoundOutcome) -> None:
        """What the trainer does after a commit, but for the outer step."""
        assert outcome.verdict == "commit", outcome
        before = self.position
        tokens, ledger = before.tokens + sum(outcome.tokens.values()), before.ledger.after(outcome.readings)
        self.position = Position(before.round + 1, outcome.lineage, ZERO, tokens, ledger)
        self._network.run(self.process.committed(self.position))

    def finish_round(self, *, retries: int = 5) -> Future[list[RoundOutcome]]:
        """Get through one round as a trainer does: retry, commit with the outer step, or catch up with the others."""
        return self._network.start(self._finish_round(retries))

    async def _finish_round(self, retries: int) -> list[RoundOutcome]:
        outcomes: list[RoundOutcome] = []
        self._encode()
        for _ in range(retries + 1):
            outcomes.append(outcome := await self.process.average(RoundRequest(1.0, 1)))
            if outcome.verdict == "commit":
                outer_step(state := self.state, self.vectors["average"], OuterConfig())
                tokens = self.position.tokens + sum(outcome.tokens.values())
                self.position = Position(state.round, outcome.lineage, params_hash(state), tokens)
                await self.process.committed(self.position)
                break
            if outcome.verdict == "resync":
                self.recoveries.append(recovery := await self.process.catch_up())
                self.position = recovery.position
                await self.process.begin_phase(False, 0)
                break
        return outcomes

    @property
    def state(self) -> OuterState:
        """Its outer state; shares memory with it."""
        vectors = self.vectors
        return OuterState(vectors["theta"], vectors["momentum"], vectors["second_moment"], round=self.position.round)

    @property
    def daemon(self) -> psutil.Process:
        """Its libp2p daemon."""
        keys = str(self._folder)
        (found,) = (child for child in psutil.Process().children(recursive=True) if keys in " ".join(child.cmdline()))
        return found

    def sees(self) -> set[str]:
        """Peer ids of the other live workers, as this one knows them."""
        return set(self.process._membership.view)

    def awaits(self, other: Peer) -> bool:
        """Whether this worker counts another one among those of its round."""
        return other.peer_id in self.process._presence.outlook().candidates

    def awaited(self) -> str:
        """Whom this worker's round waits for."""
        return self._network.run(self.process.awaited())

    def runs(self) -> Mapping[str, list[Contract]]:
        """The runs on the DHT that have workers."""
        return self._network.run(self.process.find_runs(None, True))

    def leave(self) -> None:
        """Say goodbye and stop."""
        self._network.run(self.process.leave())
        self.close()

    def close(self) -> None:
        """Stop without a word to others."""
        if self._closed:
            return
        self._closed = True
        self._opening.cancel()
        self._network.run(self.process.close())
        os.close(self._memory)
        shutil.rmtree(self._folder, ignore_errors=True)


class Network:
    """Makes peers, and closes them all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._peers: list[Peer] = []
        self._started: list[Future[Any]] = []

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the network thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._started.append(future)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the network thread and wait for its result."""
        return self.start(work).result(LIMIT_S)

    def peer(self, peers: Sequence[str] = (), *, key_file: Path | None = None, **settings: Any) -> Peer:
        """A peer that begins to join through the addresses `peers`; `settings` are those of `swarm`."""
        folder = Path(tempfile.mkdtemp(prefix="peer-"))
        settings = {"heartbeat_s": 0.5, "expiry_s": 20.0} | settings
        config = SwarmConfig(peers=tuple(peers), **settings)
        peer = Peer(self, folder, config, Identity.load_or_create(key_file or folder / "identity.key"))
        self._peers.append(peer)
        return peer

    def peers(self, count: int, through: Sequence[str] = (), **settings: Any) -> list[Peer]:
        """Peers of one DHT: that of the addresses `through`, or a new one that the first of them starts."""
        first = [] if through else [self.peer(**settings).open()]
        addresses = through or first[0].addresses
        others = [self.peer(addresses, **settings) for _ in range(count - len(first))]
        return [*first, *(peer.open() for peer in others)]

    def workers(
        self,
        count: int,
        through: Sequence[str] = (),
        *,
        contract: Contract | None = None,
        size: int = 1000,
        settings: Mapping[str, Any] | None = None,
        **rounds: Any,
    ) -> list[Peer]:
        """Workers of one run that have all seen each other."""
        peers = self.peers(count, through, **(settings or {}))
        contract = contract or self.contract(count, **rounds)
        self.enter(peers, contract, size=size)
        return peers

    @staticmethod
    def contract(start_peers: int, *, run: str = "test", codec: str = "int8", **rounds: Any) -> Contract:
        """A run contract; `rounds` are settings of that section."""
        settings = RoundsConfig(start_peers=start_peers, **rounds)
        return Contract(run=RunConfig(id=run), outer=OuterConfig(codec=codec), rounds=settings)

    def enter(
        self, peers: Sequence[Peer], contract: Contract, *, size: int = 1000, position: Position | None = None
    ) -> None:
        """Make peers workers of a run, and wait until all its start_peers have seen each other."""
        for peer in peers:
            peer.enter(contract, size=size, position=position)
        waiting = [self.start(peer.process.wait_for_start()) for peer in peers]
        assert min(future.result(LIMIT_S) for future in waiting) >= contract.rounds.start_peers

    def round(self, peers: Sequence[Peer], weights: Sequence[float] = ()) -> list[RoundOutcome]:
        """A round that all these peers arrive at, and commit."""
        futures = [peer.average(weight) for peer, weight in zip(peers, weights or [1.0] * len(peers), strict=True)]
        outcomes = [future.result(LIMIT_S) for future in futures]
        for peer, outcome in zip(peers, outcomes, strict=True):
            peer.commit(outcome)
        return outcomes

    def close(self) -> None:
        for future in self._started:
            future.cancel()
        with ThreadPoolExecutor(max(1, len(self._peers))) as threads:
            list(threads.map(Peer.close, self._peers))


@pytest.fixture(scope="session")
def network_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread, as in a network process."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="network", daemon=True)
    thread.start()
    yield loop
    asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result(LIMIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _cancel_tasks() -> None:
    """What hivemind leaves to the end of the process."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def network(network_thread: asyncio.AbstractEventLoop) -> Iterator[Network]:
    network = Network(network_thread)
    yield network
    network.close()


@pytest.fixture(scope="module")
def module_network(network_thread: asyncio.AbstractEventLoop) -> Iterator[Network]:
    network = Network(network_thread)
    yield network
    network.close()
