"""How a worker ends: on request in order, and however it is killed, nothing stays and it can be started again."""

from __future__ import annotations

import re
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from opendiloco.config import Contract
from opendiloco.flat import FlatLayout, gather, trainable_parameters
from opendiloco.model import build_model
from opendiloco.outer import OuterState, params_hash
from opendiloco.rounds import Position
from opendiloco.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from support.commands import Command, Commands
    from support.peers import Network, Peer
    from support.waiting import WaitUntil

LEAVE_LIMIT_S = 10.0
CLEAN_LIMIT_S = 8.0


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def folder_of(worker: Command) -> Path:
    """Where the sockets of its daemon are."""
    (daemon,) = (process for process in worker.below() if process.name() == "p2pd")
    return Path(daemon.environ()["TMPDIR"])


def guard(worker: Command) -> psutil.Process:
    (found,) = psutil.Process(worker.popen.pid).children()
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Waiting:
    """A run whose workers are done with their first inner phase and wait for one that never comes."""

    straggler: Peer
    workers: dict[str, Command]
    port: int
    """Where the worker that is going to be killed listens."""

    @property
    def listen(self) -> str:
        return f'swarm.host_maddrs=["/ip4/127.0.0.1/tcp/{self.port}"]'

    def count(self) -> int:
        """Live workers of the round, the straggler included."""
        return int(self.straggler.awaited().split()[2])


def straggler_position(contract: Contract) -> tuple[str, Position]:
    """Layout and position of a fresh worker of the run."""
    vocab_size = load_tokenizer(contract.data.tokenizer).vocab_size
    model = build_model(contract.model, vocab_size=vocab_size, seq_len=contract.data.seq_len, seed=contract.run.seed)
    layout = FlatLayout.of(model)
    theta = torch.empty(layout.numel)
    gather(trainable_parameters(model), theta)
    state = OuterState.start(theta, contract.outer, contract_digest=contract.digest)
    return layout.digest, Position(0, state.lineage, params_hash(state))


@pytest.fixture(scope="module")
def waiting(module_network: Network, module_commands: Commands, wait_until: WaitUntil) -> Waiting:
    contract = module_commands.contract(grace=3600.0)
    straggler = module_network.peer().open()
    layout, position = straggler_position(contract)
    straggler.enter(contract, layout=layout, position=position, size=1)
    port = free_port()
    workers: dict[str, Command] = {}
    run = Waiting(straggler, workers, port)

    def start(name: str, *sets: str) -> None:
        workers[name] = module_commands.worker(straggler.addresses, sets=sets)

    def are_waiting() -> bool:
        """Those that came late in the phase of the others may follow, and do not count."""
        running = [worker.popen.poll() is None for worker in workers.values()]
        assert all(running), [worker.errors for worker in workers.values()]
        is_waited_for = re.fullmatch(r"(\d) of \1 workers are there", straggler.awaited()) is not None
        return is_waited_for and len(straggler.sees()) == len(workers)

    start("asked")
    wait_until(are_waiting, "the first worker waits for the straggler")
    start("severed")
    start("killed", run.listen)
    wait_until(are_waiting, "all workers wait for the straggler")
    return run


def test_worker_that_waits_for_others_leaves_in_order_when_asked(waiting: Waiting, wait_until: WaitUntil) -> None:
    worker, before = waiting.workers["asked"], waiting.count()
    helpers, folder = worker.below(), folder_of(worker)
    worker.popen.send_signal(signal.SIGINT)
    assert worker.wait(LEAVE_LIMIT_S) == 0
    assert not [process for process in helpers if not is_gone(process)]
    assert not folder.exists()
    assert [(event["round"], event["reason"]) for event in worker.events("leave")] == [(0, "asked to leave")]
    wait_until(lambda: waiting.count() < before, "others know", limit_s=5.0)  # much sooner than its record expires


def test_killed_network_process_ends_the_trainer_with_one_line(waiting: Waiting, wait_until: WaitUntil) -> None:
    worker = waiting.workers["severed"]
    helpers, folder = worker.below(), folder_of(worker)
    worker.network_process().kill()
    assert worker.wait(LEAVE_LIMIT_S) == 75
    assert "the network process of this peer has ended: the reason is in" in worker.complaint
    wait_until(lambda: all(map(is_gone, helpers)), "its helpers are gone", limit_s=CLEAN_LIMIT_S)
    wait_until(lambda: not folder.exists(), "its sockets are gone", limit_s=CLEAN_LIMIT_S)


def test_killed_trainer_leaves_nothing_and_starts_again_at_once_with_its_key_and_port(
    waiting: Waiting, commands: Commands, wait_until: WaitUntil
) -> None:
    worker = waiting.workers["killed"]
    helpers, folder = worker.below(), folder_of(worker)
    assert len(helpers) >= 3  # guard, network process, daemon
    (joined,) = worker.events("join")
    worker.popen.kill()
    killed = time.monotonic()
    addresses = worker.folder / "addresses.txt"
    again = commands.start(
        *("train", "--peers", *waiting.straggler.addresses, "--address-file", str(addresses)),
        *("--set", waiting.listen, "--set", "compute.threads=1"),
        folder=worker.folder,
    )
    wait_until(lambda: all(map(is_gone, helpers)), "its helpers are gone", limit_s=CLEAN_LIMIT_S)
    wait_until(lambda: not folder.exists(), "its sockets are gone", limit_s=CLEAN_LIMIT_S)
    assert time.monotonic() - killed < CLEAN_LIMIT_S
    wait_until(lambda: len(again.events("join")) == 2 or again.popen.poll() is not None, "it has joined again")
    assert again.popen.poll() is None, again.errors
    assert again.events("join")[1]["peer"] == joined["peer"]
    assert addresses.read_text().split() == [f"/ip4/127.0.0.1/tcp/{waiting.port}/p2p/{joined['peer']}"]


def test_killed_bootstrap_peer_without_a_folder_leaves_nothing(commands: Commands, wait_until: WaitUntil) -> None:
    temporary = Path(tempfile.gettempdir())
    before = set(temporary.glob("opendiloco*"))
    peer = commands.start("bootstrap", is_told=False)
    out = peer.folder / "stdout.txt"
    wait_until(lambda: out.exists() and "/p2p/" in out.read_text(), "it is there")
    helpers = peer.below()
    assert len(helpers) >= 3  # guard, network process, daemon
    peer.popen.kill()
    wait_until(lambda: all(map(is_gone, helpers)), "its helpers are gone", limit_s=CLEAN_LIMIT_S)
    wait_until(lambda: set(temporary.glob("opendiloco*")) <= before, "its files are gone", limit_s=CLEAN_LIMIT_S)


@pytest.mark.parametrize(
    ("number", "to_helpers"),
    [(signal.SIGHUP, None), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)],
    ids=["terminal", "service", "group"],
)
def test_worker_in_the_middle_of_its_training_leaves_in_order_when_asked(
    commands: Commands, wait_until: WaitUntil, number: signal.Signals, to_helpers: signal.Signals | None
) -> None:
    """Whoever stops a service may signal its network process and its daemon at the same time."""
    worker = commands.worker(contract=commands.contract(rounds=100_000), sets=["checkpoint.every_rounds=1000"])
    wait_until(lambda: worker.events("round") or worker.popen.poll() is not None, "it has trained a round")
    for helper in worker.below() if to_helpers else ():
        helper.send_signal(to_helpers)
    assert (worker.folder / "addresses").exists()
    worker.popen.send_signal(number)
    assert worker.wait(LEAVE_LIMIT_S) == 0, worker.errors
    assert len(list((worker.folder / "checkpoints").glob("round-*"))) == 1
    last = worker.events()[-1]
    assert (last["event"], last["reason"]) == ("leave", "asked to leave")
    assert last["round"] == worker.events("round")[-1]["round"]
    assert (worker.folder / "model" / "model.safetensors").is_file()
    assert not (worker.folder / "addresses").exists()  # or others would try them


def test_worker_whose_network_process_is_frozen_ends_when_asked(commands: Commands, wait_until: WaitUntil) -> None:
    worker = commands.worker(contract=commands.contract(rounds=100_000))
    wait_until(lambda: worker.events("round") or worker.popen.poll() is not None, "it has trained a round")
    helpers = worker.below()
    worker.network_process().suspend()
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.wait(2 * LEAVE_LIMIT_S) == 0, worker.errors
    assert (worker.folder / "model" / "model.safetensors").is_file()
    wait_until(lambda: all(map(is_gone, helpers)), "nothing of it is left")


def test_worker_that_waits_for_the_first_round_leaves_when_asked(
    network: Network, commands: Commands, wait_until: WaitUntil
) -> None:
    observer = network.peer().open()
    worker = commands.worker(observer.addresses, commands.contract(start_peers=2))
    wait_until(lambda: "test" in observer.runs() or worker.popen.poll() is not None, "it has entered the run")
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.wait(LEAVE_LIMIT_S) == 0, worker.errors
    assert "Traceback" not in worker.errors


def test_worker_that_cannot_reach_anybody_yet_leaves_when_asked(commands: Commands, wait_until: WaitUntil) -> None:
    """Its only address is a port that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        nobody = "12D3KooWPVkYcj4DJaNsg92hMm1yLkBYbwtSipMDBsCuGbFShCXa"
        worker = commands.worker([f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{nobody}"])
        listener.settimeout(60)
        connection, _ = listener.accept()  # its daemon has begun to dial
        with connection:
            worker.popen.send_signal(signal.SIGINT)
            assert worker.wait(LEAVE_LIMIT_S) == 0, worker.errors
    assert "Traceback" not in worker.errors
