"""Finding a swarm: through any of its peers, or one line that says why there is none to find."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import dht_pb2
from support.waiting import LIMIT_S

from opendiloco.errors import OpendilocoError, SettingsError, SwarmError
from opendiloco.identity import Identity
from opendiloco.membership import SignedRecords

if TYPE_CHECKING:
    from support.peers import Network, Peer
    from support.waiting import WaitUntil

SKEWED_PEER = """
import sys, time
real = time.time
time.time = lambda: real() + float(sys.argv[1])
import asyncio
from hivemind.dht import DHTNode
from hivemind.p2p import P2P

async def main():
    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    node = await DHTNode.create(p2p=p2p)
    print((await p2p.get_visible_maddrs())[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.shutdown()
    await p2p.shutdown()

asyncio.run(main())
"""
"""A peer whose clock is off by argv[1] seconds, until its standard input ends; it prints its address."""


def dead_address(tmp_path: Path) -> str:
    """A well-formed address where nobody is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.load_or_create(tmp_path / 'nobody.key').peer_id}"


def is_one_line(error: OpendilocoError) -> bool:
    return "\n" not in str(error) and "Traceback" not in str(error)


def test_peers_that_know_one_address_find_each_other(network: Network) -> None:
    bootstrap = network.peer().open()
    workers = network.workers(3, bootstrap.addresses[:1])
    assert [peer.wait_for_start() for peer in workers] == [3, 3, 3]


def test_every_worker_is_an_entrance(network: Network) -> None:
    chain = [network.peer().open()]
    for _ in range(3):  # each knows only the one before it
        chain.append(network.peer(chain[-1].addresses[:1]).open())
    network.enter(chain, network.contract(4))
    assert [peer.wait_for_start() for peer in chain] == [4, 4, 4, 4]
    network.round(chain)


def test_the_swarm_outlives_its_first_peer(network: Network) -> None:
    bootstrap = network.peer().open()
    contract = network.contract(2)
    old = network.workers(2, bootstrap.addresses, contract=contract)
    bootstrap.close()
    newcomer = network.peer(old[1].addresses).open()
    assert newcomer.runs() == {"test": [contract]}
    network.enter([newcomer], contract)
    outcomes = network.round([*old, newcomer])
    assert {frozenset(outcome.weights) for outcome in outcomes} == {
        frozenset(peer.peer_id for peer in [*old, newcomer])
    }


def test_a_peer_that_answers_late_is_joined_all_the_same(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later than a look-up may take, which is a part of `expiry_s`: 0.5 s here."""
    answer, delays_s = DHTProtocol.rpc_ping, [1.5]

    async def answer_late(
        self: DHTProtocol, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:  # hivemind reads these types
        if delays_s:
            await asyncio.sleep(delays_s.pop())
        return await answer(self, request, context)

    monkeypatch.setattr(DHTProtocol, "rpc_ping", answer_late)
    first = network.peer(expiry_s=2.0).open()
    network.enter([first, network.peer(first.addresses, expiry_s=2.0).open()], network.contract(2))
    assert not delays_s


@pytest.mark.parametrize("failures", [2, 9])
def test_a_peer_that_others_do_not_reach_is_refused_only_when_that_is_no_matter_of_a_moment(
    network: Network, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    ask, unreached = DHTProtocol.rpc_ping, list(range(failures))

    async def miss(
        self: DHTProtocol, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:  # hivemind reads these types
        response = await ask(self, request, context)
        if request.validate and unreached:
            unreached.pop()
            response.available = False
        return response

    monkeypatch.setattr(DHTProtocol, "rpc_ping", miss)
    first = network.peer().open()
    second = network.peer(first.addresses)
    if failures == 2:
        network.enter([first, second.open()], network.contract(2))
        assert not unreached
    else:
        with pytest.raises(SettingsError, match="others cannot reach this peer: open its port"):
            second.open()


def start(peer: Peer) -> None:
    """Until it need not catch up: the record of one that was killed counts until it expires."""
    while peer.wait_for_start() == 0:
        pass


@pytest.mark.parametrize("end", ["leave", "close"])
def test_a_run_whose_workers_have_all_gone_is_not_begun_anew_by_who_came_to_join_it(network: Network, end: str) -> None:
    bootstrap = network.peer().open()
    contract = network.contract(1)
    old = network.peer(bootstrap.addresses, expiry_s=3.0).open()
    network.enter([old], contract)
    network.round([old])
    newcomer = network.peer(bootstrap.addresses, startup_timeout_s=5.0).open()
    assert newcomer.runs() == {"test": [contract]}
    getattr(old, end)()
    newcomer.enter(contract)
    with pytest.raises(SwarmError, match=r"run test had reached round 1, and none .* --resume latest .* run\.id"):
        start(newcomer)
    assert newcomer.awaited() == "none of the workers that had reached round 1 is there any more"
    other = network.contract(1, run="other")
    network.enter([network.peer(bootstrap.addresses).open()], other)


def test_one_living_address_among_dead_ones_is_enough(network: Network, tmp_path: Path) -> None:
    first = network.peer().open()
    second = network.peer([dead_address(tmp_path), *first.addresses]).open()
    network.enter([first, second], network.contract(2))
    network.round([first, second])


def test_addresses_that_never_answer_do_not_hold_up_the_one_that_does(network: Network, tmp_path: Path) -> None:
    """Machines behind a firewall, frozen ones: each costs libp2p 5 s, so one after the other would take 40 s."""
    first = network.peer().open()
    with contextlib.ExitStack() as stack:
        silent = []
        for index in range(8):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen()  # connections are made, and nothing ever comes
            nobody = Identity.load_or_create(tmp_path / f"{index}.key").peer_id
            silent.append(f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{nobody}")
        second = network.peer([*silent, *first.addresses], startup_timeout_s=30.0).open()
    network.enter([first, second], network.contract(2))
    network.round([first, second])


def test_peer_that_comes_up_later_is_found_within_the_limit(network: Network, tmp_path: Path) -> None:
    """Peers that are started together, in whatever order."""
    address = dead_address(tmp_path)
    second = network.peer([address])
    port = address.split("/")[4]
    first = network.peer(key_file=tmp_path / "nobody.key", host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",)).open()
    network.enter([first, second.open()], network.contract(2))
    network.round([first, second])


def test_a_peer_that_listens_before_it_is_on_the_dht_is_waited_for(
    network: Network, tmp_path: Path, wait_until: WaitUntil
) -> None:
    address = dead_address(tmp_path)
    identity = Identity.load_or_create(tmp_path / "nobody.key")

    async def listen() -> P2P:
        maddrs = [address.partition("/p2p/")[0]]
        key_file = str(tmp_path / "nobody.key")
        return await P2P.create(host_maddrs=maddrs, identity_path=key_file, check_if_identity_free=False)

    first = network.run(listen())
    second = network.peer([address])
    wait_until(lambda: len(network.run(first.list_peers())) > 0, "it is connected")
    asked = network.start(second.process._host._has_dht(first.peer_id))
    assert not asked.result(LIMIT_S)
    node = network.run(DHTNode.create(p2p=first, record_validator=SignedRecords(identity)))
    assert second.open().addresses
    network.run(node.shutdown())
    network.run(first.shutdown())


def test_dead_address_ends_in_one_line_that_names_it_within_the_limit(network: Network, tmp_path: Path) -> None:
    address = dead_address(tmp_path)
    started = time.monotonic()
    with pytest.raises(SwarmError) as raised:
        network.peer([address], startup_timeout_s=3.0).open()
    assert time.monotonic() - started < 8.0
    assert address in str(raised.value)
    assert "swarm.startup_timeout_s is 3" in str(raised.value)
    assert is_one_line(raised.value)
    assert raised.value.exit_code == 75


@pytest.mark.parametrize("address", ["/ip4/1.2.3.4/tcp/99999/p2p/Qm1", "/ip4/1.2.3.4/tcp/1/p2p/12D3Koo"])
def test_malformed_peer_address_is_refused_with_the_right_shape(network: Network, address: str) -> None:
    with pytest.raises(SettingsError, match="write it as /ip4/HOST/tcp/PORT/p2p/PEER_ID") as raised:
        network.peer([address]).open()
    assert f"swarm.peers '{address}' is no address" in str(raised.value)
    assert is_one_line(raised.value)


def test_malformed_listen_address_is_refused_with_the_right_shape(network: Network) -> None:
    with pytest.raises(SettingsError, match=r"swarm\.host_maddrs '/ip4/nowhere/tcp/0' is no address: write it as /ip4"):
        network.peer(host_maddrs=("/ip4/nowhere/tcp/0",)).open()


def test_address_of_another_machine_is_refused(network: Network) -> None:
    with pytest.raises(SettingsError, match=r"swarm\.host_maddrs .*192\.0\.2\.1.*: name an address of this machine"):
        network.peer(host_maddrs=("/ip4/192.0.2.1/tcp/4321",)).open()


def test_clock_that_is_off_says_by_how_much(network: Network) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SKEWED_PEER, "60"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as skewed:
        assert skewed.stdout is not None
        address = skewed.stdout.readline().strip()
        with pytest.raises(SettingsError, match=r"is (59|60|61)\.\d s behind the swarm's") as raised:
            network.peer([address]).open()
        skewed.communicate("")
    assert "NTP" in str(raised.value)
    assert is_one_line(raised.value)


def test_two_runs_on_one_dht_keep_their_workers_apart(network: Network, wait_until: WaitUntil) -> None:
    bootstrap = network.peer().open()
    apart = [network.workers(2, bootstrap.addresses, run=run) for run in ("left", "right")]
    assert [[peer.wait_for_start() for peer in workers] for workers in apart] == [[2, 2], [2, 2]]
    wait_until(lambda: sorted(bootstrap.runs()) == ["left", "right"], "both runs are listed")
    futures = [[peer.average() for peer in workers] for workers in apart]
    for workers, of_run in zip(apart, futures, strict=True):
        for future in of_run:
            assert set(future.result(30).weights) == {peer.peer_id for peer in workers}
