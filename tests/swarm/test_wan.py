"""Hosts in network namespaces: links that carry what they should, that can be cut, and that go with their owner."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks import bench_dht, bench_recover, bench_train, bench_wan
from benchmarks.netns import Hosts, NamespaceHost, why_not

if TYPE_CHECKING:
    from support.commands import Commands
    from support.noisy import RunBenchmark
    from support.waiting import WaitUntil

if reason := why_not():  # they take root, which those who run the tests need not have
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).parents[2]
SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 9))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    count = 0
    while piece := connection.recv(1 << 16):
        count += len(piece)
    print(count, flush=True)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 9), float(sys.argv[3]))
connection.sendall(bytes(int(sys.argv[2])))
"""
OWN = """
import sys, time
from benchmarks.netns import Hosts
with Hosts(2) as network:
    print(network.hosts[0].prefix[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(3, mbit=8.0) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def server(network: Hosts) -> Iterator[subprocess.Popen[str]]:
    """Counts what it gets on the first host."""
    command = [*network.hosts[0].prefix, sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def send(sender: NamespaceHost, to: NamespaceHost, size: int, *, limit_s: float) -> bool:
    """Whether it could connect and hand over so many bytes."""
    command = [*sender.prefix, sys.executable, "-c", SEND, to.ip, str(size), str(limit_s)]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_link_carries_no_more_than_its_rate_and_counts_what_it_carries(
    network: Hosts, server: subprocess.Popen[str]
) -> None:
    size, (receiver, sender, _) = 1_000_000, network.hosts
    before, started = receiver.carried_bytes, time.monotonic()
    assert send(sender, receiver, size, limit_s=60)
    assert server.stdout is not None
    assert int(server.stdout.readline()) == size
    assert time.monotonic() - started >= 0.9 * size * 8 / 8e6
    assert size < receiver.carried_bytes - before < 1.2 * size


def test_a_cut_host_is_out_of_reach_until_its_link_is_mended(network: Hosts, server: subprocess.Popen[str]) -> None:
    receiver, _, sender = network.hosts
    assert server.stdout is not None
    network.cut(sender)
    assert not send(sender, receiver, 10, limit_s=0.5)
    network.mend(sender)
    assert send(sender, receiver, 10, limit_s=60)
    assert int(server.stdout.readline()) == 10


def test_a_host_behind_a_router_gets_out_and_nobody_gets_in(commands: Commands, wait_until: WaitUntil) -> None:
    """A worker there hears so at once, and takes part as a client, which two others reduce for."""
    if shutil.which("nft") is None:
        pytest.skip("nft not found: install nftables")
    with Hosts(3, hidden=[2]) as network:
        first_host, second_host, hidden = network.hosts
        assert not send(first_host, hidden, 10, limit_s=0.5)
        contract = commands.contract(rounds=4, start_peers=3)
        first = commands.worker(contract=contract, sets=first_host.sets, host=first_host)
        wait_until(lambda: (first.folder / "addresses").exists(), "it can be joined")
        peers = (first.folder / "addresses").read_text().split()
        second = commands.worker(peers, sets=second_host.sets, host=second_host)
        refused = commands.worker(peers, sets=hidden.sets, host=hidden)
        assert refused.wait() == 64
        assert "others cannot reach this peer" in refused.complaint
        client = commands.worker(peers, sets=["swarm.client_mode=true"], host=hidden)
        everybody = [first, second, client]
        assert [worker.wait() for worker in everybody] == [0, 0, 0], client.errors
        rounds = [[one for one in worker.events("round") if one["verdict"] == "commit"] for worker in everybody]
        assert len({tuple((one["round"], one["params_hash"]) for one in of_worker) for of_worker in rounds}) == 1
        assert all(len(one["participants"]) == 3 for of_worker in rounds for one in of_worker)


def test_a_doctor_says_how_fast_a_link_is_each_way(commands: Commands, wait_until: WaitUntil) -> None:
    with Hosts(2, mbit=8.0) as network:
        there, here = network.hosts
        worker = commands.worker(contract=commands.contract(rounds=100_000), sets=there.sets, host=there)
        wait_until(lambda: [one for one in worker.events("round") if one["verdict"] == "commit"], "it trains")
        peers = (worker.folder / "addresses").read_text().split()
        sets = [word for setting in here.sets for word in ("--set", setting)]
        asked = commands.start("doctor", *sets, "--peers", *peers, host=here)
        assert asked.wait() == 0
        said = (asked.folder / "stdout.txt").read_text()
        found = re.search(r"a worker gives ([\d,]+) Mbit/s and takes ([\d,]+) Mbit/s", said)
        assert found, said
        down, up = (float(rate) for rate in found.groups())
        assert 4 <= down <= 9, said
        assert 4 <= up <= 9, said


def test_links_go_with_their_owner_however_it_ends(wait_until: WaitUntil) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        inside = ["nsenter", owner.stdout.readline().strip(), "sh", "-c", "echo $$; exec sleep 1000"]
        with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as guest:
            assert guest.stdout is not None
            pid = int(guest.stdout.readline())
            devices = Path(f"/proc/{pid}/net/dev")
            assert "eth0" in devices.read_text()
            os.kill(owner.pid, signal.SIGKILL)
            wait_until(lambda: "eth0" not in devices.read_text(), "the link is gone")
            guest.kill()
    assert not psutil.pid_exists(pid)


def test_the_benchmark_of_slow_links_runs_and_says_what_a_round_took(run_benchmark: RunBenchmark) -> None:
    (line,) = run_benchmark(bench_wan)
    assert line["identical"]
    assert line["rounds"] >= 3
    assert line["round_s"] >= line["wire_limit_s"] > 0
    assert line["carried_bytes_per_round"] > 100_000


def test_the_benchmark_of_recovery_says_what_joining_and_catching_up_took(run_benchmark: RunBenchmark) -> None:
    join, missed = run_benchmark(bench_recover)
    assert join["seconds"] >= 0.9 * join["limit_s"] > 0  # a link gives a little more in one go
    assert join["received_bytes"] > join["state_bytes"] == 800_000
    assert not missed["full_state"]
    assert missed["replayed"] == missed["missed"] >= 1
    assert missed["replayed"] * 100_000 < missed["received_bytes"] < join["received_bytes"]
    assert missed["part_again_s"] >= missed["seconds"] > 0


def test_the_benchmark_of_many_peers_says_what_each_of_them_spends(run_benchmark: RunBenchmark) -> None:
    lines = run_benchmark(bench_dht)
    assert [(line["workers"], line["complete"], line["identical"]) for line in lines] == [
        (2, True, True),
        (3, True, True),
    ]
    for line in lines:
        assert 0 < line["rendezvous_s"] <= line["worst_rendezvous_s"]
        assert line["standing_bytes_per_s"] > 0
        assert 0 < line["standing_cpu_share"] < 1


def test_the_benchmark_of_training_systems_gives_all_of_them_the_same_to_do_and_leaves_no_process(
    run_benchmark: RunBenchmark,
) -> None:
    before = psutil.Process().children(recursive=True)
    lines = run_benchmark(bench_train)
    assert psutil.Process().children(recursive=True) == before
    assert [line["system"] for line in lines] == ["opendiloco", "hivemind DiLoCo", "gloo DDP"]
    assert [(line["failed"], line["problems"]) for line in lines] == [("", [])] * 3
    assert len({(line["tokens"], line["each"]["loss"][0]) for line in lines}) == 1
    assert all(0 < line["utilization"] < 1 and line["bytes_per_token"] > 0 for line in lines)
    assert [lines[index]["identical_rounds"] for index in (0, 2)] == [2, 2]
    ours, theirs, _ = (line["each"]["loss"] for line in lines)
    assert theirs == pytest.approx(ours, abs=2e-4)  # the same algorithm, but for the codecs
