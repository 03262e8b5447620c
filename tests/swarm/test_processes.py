"""`Swarm` handles with their network processes: one owner per key, nothing is left of a process that was killed."""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from opendiloco.errors import SettingsError, SwarmError
from opendiloco.rounds import Position, RoundRequest

if TYPE_CHECKING:
    from conftest import Network, Swarms, WaitUntil

NOBODY = "12D3KooWPVkYcj4DJaNsg92hMm1yLkBYbwtSipMDBsCuGbFShCXa"
START = Position(0, "0" * 64, "0" * 64)


def helpers_of_this_process() -> list[psutil.Process]:
    """Guards, network processes and libp2p daemons below this process."""
    return psutil.Process().children(recursive=True)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_workers_in_processes_of_their_own_average_within_a_second(network: Network, swarms: Swarms) -> None:
    bootstrap = network.peer().open()
    handles = swarms(3, bootstrap.addresses)
    contract = network.contract(3, codec="none")
    vectors = [swarm.allocate({"pseudo_gradient": 5000, "average": 5000}) for swarm in handles]
    entering = [threading.Thread(target=swarm.enter, args=(contract, "0" * 64, START)) for swarm in handles]
    for thread in entering:
        thread.start()
    for thread in entering:
        thread.join()
    took_s = []
    for round in range(5):
        for index, vector in enumerate(vectors):
            vector["pseudo_gradient"].fill_(index * round)
        started = time.monotonic()
        futures = [swarm.average(RoundRequest(weight=1.0, tokens=7)) for swarm in handles]
        outcomes = [future.result(30) for future in futures]
        took_s.append(time.monotonic() - started)
        assert {outcome.verdict for outcome in outcomes} == {"commit"}
        assert all(bool((vector["average"] == round).all()) for vector in vectors)
        assert all(outcome.tokens == {swarm.peer_id: 7 for swarm in handles} for outcome in outcomes)
        for swarm in handles:
            swarm.committed(Position(round + 1, outcomes[0].digest, "0" * 64))
    assert min(took_s) < 1.0


def test_killed_network_process_fails_what_waits_for_it_and_leaves_nothing(
    network: Network, swarms: Swarms, wait_until: WaitUntil
) -> None:
    bootstrap = network.peer().open()
    folders = set(Path(tempfile.gettempdir()).glob("opendiloco-*"))
    before = set(helpers_of_this_process())
    (swarm,) = swarms(1, bootstrap.addresses)
    helpers = [process for process in helpers_of_this_process() if process not in before]
    assert len(helpers) >= 3  # guard, network process, daemon
    swarm.allocate({"pseudo_gradient": 10, "average": 10})
    swarm.enter(network.contract(1), "0" * 64, START)
    waiting = threading.Event()
    other = network.peer(bootstrap.addresses).open()
    other.enter(network.contract(1))
    wait_until(lambda: "1 of 2" in swarm.awaited() or other.peer_id in swarm.awaited(), "the other one is seen")
    future = swarm.average(RoundRequest(weight=1.0, tokens=1))
    future.add_done_callback(lambda _: waiting.set())
    (process,) = (p for p in helpers if p.cmdline()[1:3] == ["-m", "opendiloco.network"])
    process.send_signal(signal.SIGKILL)
    assert waiting.wait(10)
    with pytest.raises(SwarmError, match="the network process of this peer has ended: the reason is in"):
        future.result()
    wait_until(lambda: all(map(is_gone, helpers)), "all its helpers are gone", limit_s=10)
    wait_until(
        lambda: set(Path(tempfile.gettempdir()).glob("opendiloco-*")) == folders, "its folder is gone", limit_s=10
    )
    with pytest.raises(SwarmError, match="has ended"):
        swarm.check()


def test_key_file_belongs_to_one_process_at_a_time(network: Network, swarms: Swarms, tmp_path: Path) -> None:
    key_file = tmp_path / "shared.key"
    (holder,) = swarms(1, identity=str(key_file))
    with pytest.raises(SettingsError, match=rf"swarm\.identity {key_file} is in use by another process") as raised:
        swarms(1, holder.addresses, identity=str(key_file))
    assert raised.value.exit_code == 64
    holder.close()
    swarms(1, identity=str(key_file))


def test_address_where_somebody_else_listens_is_given_up_within_the_limit(swarms: Swarms) -> None:
    """A port that takes connections and never says a word: the wait is bounded all the same."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = (
            f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/12D3KooWPVkYcj4DJaNsg92hMm1yLkBYbwtSipMDBsCuGbFShCXa"
        )
        with pytest.raises(SwarmError, match=f"swarm.peers {address}: none answered within 3 s") as raised:
            swarms(1, [address], startup_timeout_s=3.0)
    assert raised.value.exit_code == 75
