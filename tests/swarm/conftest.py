"""Real peers on loopback, as cheap as a claim allows.

`network` makes peers whose network side runs in a thread of this process: libp2p daemon, DHT node, rendezvous and
all-reduce are real, only the process boundary to the trainer is missing. `commands` makes `opendiloco` processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import pytest
import uvloop
from torch import Tensor

from opendiloco.config import (
    Contract,
    DataConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
    RunConfig,
    SwarmConfig,
)
from opendiloco.identity import Identity
from opendiloco.metrics import read_metrics
from opendiloco.rounds import Position, RoundOutcome, RoundRequest
from opendiloco.settings import write_toml
from opendiloco.shared import create_shared_memory, map_vectors

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own, when it is imported
    from opendiloco.network import PeerProcess

T = TypeVar("T")

LIMIT_S = 90.0
"""Bound of every wait whose length is not the claim; the machine may be busy."""
POLL_S = 0.02
ZERO = "0" * 64


IGNORED_WARNINGS = (
    "ignore:path is deprecated:DeprecationWarning",  # hivemind starts its daemon with an old importlib.resources
    # a peer of this process that ends leaves its streams to the garbage collector, as the end of a process would
    "ignore:Exception ignored in. <function StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


class WaitUntil(Protocol):
    def __call__(self, condition: Callable[[], T], what: str, *, limit_s: float = LIMIT_S) -> T: ...


def _wait_until(condition: Callable[[], T], what: str, *, limit_s: float = LIMIT_S) -> T:
    """The first true value of `condition`; fails with `what` when none comes within `limit_s` seconds."""
    give_up = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > give_up:
            pytest.fail(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)
    return value


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    return _wait_until


# --- peers in this process -------------------------------------------------------------------------------


class Peer:
    """One peer as its trainer sees it. Calls are answered in the network thread of this process."""

    def __init__(self, network: Network, folder: Path, config: SwarmConfig, identity: Identity) -> None:
        self._network, self._folder, self._memory = network, folder, create_shared_memory()
        self.peer_id = identity.peer_id
        self.process = PeerProcess(config, identity, folder, folder, self._memory)
        self.addresses: list[str] = []
        self.position = Position(0, ZERO, ZERO)
        self.vectors: dict[str, Tensor] = {}
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
        sizes = {"theta": size, "momentum": size, "second_moment": 0, "pseudo_gradient": size, "average": size}
        self.vectors = map_vectors(self._memory, sizes)
        self._network.run(self.process.enter(contract, layout, sizes, self.position))

    def wait_for_start(self) -> int:
        """How many workers are there, once they are enough."""
        return self._network.run(self.process.wait_for_start())

    def average(self, weight: float = 1.0, tokens: int = 1) -> Future[RoundOutcome]:
        """One attempt at the round."""
        return self._network.start(self.process.average(RoundRequest(weight, tokens)))

    def commit(self, outcome: RoundOutcome) -> None:
        """What the trainer does after a commit, but for the outer step."""
        assert outcome.verdict == "commit", outcome
        before = self.position
        tokens = before.tokens + sum(outcome.tokens.values())
        self.position = Position(before.round + 1, outcome.lineage, ZERO, tokens)
        self._network.run(self.process.committed(self.position))

    def awaited(self) -> str:
        """Whom this worker's round waits for."""
        return self._network.run(self.process.awaited())

    def runs(self) -> Mapping[str, list[Contract]]:
        """The runs on the DHT."""
        return self._network.run(self.process.find_runs())

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


# --- opendiloco processes --------------------------------------------------------------------------------


class Command:
    """A running `opendiloco` command with a folder of its own."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "opendiloco", *arguments, "--out", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def errors(self) -> str:
        """What it wrote on stderr."""
        return (self.folder / "stderr.txt").read_text()

    @property
    def complaint(self) -> str:
        """The one line that says why it ended; fails when there is a traceback or another line like it."""
        lines = [line for line in self.errors.splitlines() if line.startswith("opendiloco: ")]
        assert len(lines) == 1, self.errors
        assert "Traceback" not in self.errors
        return lines[0]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far, of one kind."""
        path = self.folder / "metrics.jsonl"
        events = read_metrics(path) if path.exists() else []
        return [event for event in events if kind in (None, event["event"])]

    def below(self) -> list[psutil.Process]:
        """Its guard, its network process and libp2p's daemon."""
        return psutil.Process(self.popen.pid).children(recursive=True)

    def network_process(self) -> psutil.Process:
        """The one that runs opendiloco.network."""
        (found,) = (p for p in self.below() if p.cmdline()[1:3] == ["-m", "opendiloco.network"])
        return found

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Exit code; fails with what the command printed when it does not end in time."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.folder.name} still runs after {limit_s:g} s: {self.errors}")


class Commands:
    """Starts `opendiloco` commands, and ends those that still run."""

    def __init__(self, root: Path, text_file: Path) -> None:
        self._root, self._text_file = root, text_file
        self._started: list[Command] = []

    def start(self, *arguments: str, folder: Path | None = None) -> Command:
        """Run `opendiloco ARGUMENTS`, in a new folder or on in an old one."""
        command = Command(folder or self._root / f"command-{len(self._started)}", arguments)
        self._started.append(command)
        return command

    def worker(
        self,
        peers: Sequence[str] = (),
        contract: Contract | None = None,
        *,
        sets: Sequence[str] = (),
        folder: Path | None = None,
    ) -> Command:
        """`opendiloco train`; a worker without a contract takes the swarm's."""
        arguments = ["train", "--set", "compute.threads=1", "--set", "log.every_steps=1"]
        arguments += [part for override in sets for part in ("--set", override)]
        if peers:
            arguments += ["--peers", *peers]
        if contract is not None:
            run_toml = self._root / f"{contract.digest}.toml"
            write_toml(run_toml, contract)
            arguments += ["--run", str(run_toml)]
        return self.start(*arguments, folder=folder)

    def contract(self, *, rounds: int = 5, codec: str = "int8", **settings: Any) -> Contract:
        """A run that takes seconds; `settings` are those of `rounds`."""
        return small_contract(self._text_file, rounds=rounds, codec=codec, **settings)

    def close(self) -> None:
        running = [command for command in self._started if command.popen.poll() is None]
        helpers = [process for command in running for process in command.below()]
        for command in running:
            command.popen.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + 10
        for command in running:
            try:
                command.popen.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                command.popen.kill()
                command.popen.wait()
        psutil.wait_procs(helpers, timeout=20)


def small_contract(
    text_file: Path, *, run: str = "test", rounds: int = 5, codec: str = "int8", **settings: Any
) -> Contract:
    """A tiny model, a small text and three inner steps a round."""
    return Contract(
        run=RunConfig(id=run, rounds=rounds),
        model=ModelConfig(name="tiny"),
        data=DataConfig(source=f"text:{text_file}", seq_len=32, validation_sequences=4),
        inner=InnerConfig(steps=3, batch_size=2),
        outer=OuterConfig(codec=codec),
        rounds=RoundsConfig(**settings),
    )


class SmallContract(Protocol):
    def __call__(self, *, run: str = "test") -> Contract: ...


@pytest.fixture
def make_contract(text_file: Path) -> SmallContract:
    """Makes run contracts of workers that train for seconds."""
    return partial(small_contract, text_file)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text to train on: a few thousand words out of ten, so that a model learns something at once."""
    words = ["peer", "swarm", "round", "step", "worker", "model", "loss", "group", "leader", "codec"]
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(" ".join(draw.choices(words, k=12)) + "\n" for _ in range(400)))
    return path


@pytest.fixture
def commands(tmp_path: Path, text_file: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path, text_file)
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def module_commands(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"), text_file)
    yield commands
    commands.close()
