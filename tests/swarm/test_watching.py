"""`opendiloco monitor` beside real workers: what it says is what they do, and they do not notice it."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.commands import Command

from opendiloco.cli import main

if TYPE_CHECKING:
    from support.commands import Commands
    from support.peers import Network
    from support.waiting import WaitUntil


@pytest.fixture
def workers(commands: Commands, wait_until: WaitUntil) -> list[Command]:
    """Two workers that have committed rounds together and go on."""
    contract = commands.contract(rounds=100_000, start_peers=2)
    first = commands.worker(contract=contract, sets=["swarm.heartbeat_s=0.5", "swarm.expiry_s=2"])
    wait_until(lambda: (first.folder / "addresses").exists(), "it can be joined")
    second = commands.worker(addresses(first), sets=["swarm.heartbeat_s=0.5", "swarm.expiry_s=2"])
    wait_until(lambda: len(committed(second)) >= 2, "they have committed rounds")
    return [first, second]


def addresses(worker: Command) -> list[str]:
    return (worker.folder / "addresses").read_text().split()


def committed(worker: Command) -> list[dict[str, Any]]:
    return [event for event in worker.events("round") if event["verdict"] == "commit"]


def page_of(monitor: Command, wait_until: WaitUntil) -> str:
    """Where the page is."""
    wait_until(lambda: "shows the swarm" in monitor.errors or monitor.popen.poll() is not None, "it serves")
    found = re.search(r"http://127\.0\.0\.1:\d+/", monitor.errors)
    assert found, monitor.errors
    return found[0]


def fetch(url: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, "", {}


def test_a_snapshot_says_what_the_workers_do(workers: list[Command], commands: Commands, tmp_path: Path) -> None:
    before = committed(workers[0])[-1]
    monitor = commands.start("monitor", "--json", "--peers", *addresses(workers[0]))
    assert monitor.wait() == 0, monitor.errors
    shown = json.loads((monitor.folder / "stdout.txt").read_text())
    assert shown["run"]["id"] == "test"
    assert shown["round"] >= before["round"]
    assert shown["workers"] == 2
    assert {row["peer"] for row in shown["peers"]} == set(before["participants"])
    assert all(row["version"] and row["loss"] and row["state"] in ("training", "averaging") for row in shown["peers"])
    assert shown["tokens_per_s"] > 0
    assert shown["validation"]["loss"] > 0
    assert [one for one in shown["warnings"] if one["kind"] in ("split", "replicas", "contracts")] == []
    assert committed(workers[0])[-1]["participants"] == before["participants"]
    states = {event["peer"] for event in history_of(monitor) if event["kind"] == "state"}
    assert states == set(before["participants"])


def test_the_page_follows_the_run_and_what_it_saw_survives_its_restart(
    workers: list[Command], commands: Commands, wait_until: WaitUntil, tmp_path: Path
) -> None:
    start = ["monitor", "--web", "0", "--peers", *addresses(workers[0])]
    monitor = commands.start(*start)
    url = page_of(monitor, wait_until)
    status, page, headers = fetch(url)
    assert (status, "default-src 'self'" in headers["content-security-policy"]) == (200, True)
    for name in set(re.findall(r'(?:src|href)="([^"#:]+)"', page)):
        assert fetch(url + name)[0] == 200, name

    def news(since: int = 0) -> dict[str, Any]:
        return dict(json.loads(fetch(f"{url}api/news?since={since}")[1]))

    def kinds() -> set[str]:
        return {event["kind"] for event in news()["events"]}

    wait_until(lambda: kinds() == {"state", "round", "evaluation"}, "everything has been told of")
    told = [event["told"] for event in news()["events"] if event["kind"] == "round" and event["told"]["loss"]]
    ours = {event["round"]: event for worker in workers for event in committed(worker)}
    assert told
    assert all(one["sent_bytes"] > 0 and one["participants"] == len(ours[one["round"]]["participants"]) for one in told)
    with urllib.request.urlopen(f"{url}api/stream?since={news()['count']}", timeout=20) as stream:
        first, second = next_data(stream), next_data(stream)
    assert second["snapshot"]["time"] > first["snapshot"]["time"]
    assert second["count"] >= first["count"]

    assert fetch(url, Host="elsewhere.example")[0] == 400
    assert fetch(f"{url}api/stream", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert [fetch(url + path)[0] for path in ("api/news?since=-1", "api/news?since=x", "../pyproject.toml")] == [
        400,
        400,
        404,
    ]

    workers[1].popen.kill()
    wait_until(lambda: [one for one in news()["snapshot"]["warnings"] if one["kind"] == "silent"], "it is missed")
    monitor.popen.send_signal(signal.SIGTERM)
    assert monitor.wait() == 0, monitor.errors
    assert "Traceback" not in monitor.errors
    seen = history_of(monitor)
    again = commands.start(*start, "--out", str(monitor.folder), is_told=False)
    url = page_of(again, wait_until)
    wait_until(lambda: news()["snapshot"] is not None, "it has looked")
    assert seen == news()["events"][: len(seen)]
    assert workers[0].popen.poll() is None


def history_of(monitor: Command) -> list[dict[str, Any]]:
    """What its folder has of the run."""
    (file,) = monitor.folder.glob("history-test-*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def next_data(stream: Any) -> dict[str, Any]:
    """Of the next message of a stream of events."""
    while not (line := stream.readline()).startswith(b"data: "):
        assert line
    return dict(json.loads(line[6:]))


def test_on_a_terminal_that_is_none_snapshots_stand_below_each_other(
    workers: list[Command], commands: Commands, wait_until: WaitUntil
) -> None:
    monitor = commands.start("monitor", "--peers", *addresses(workers[0]), is_told=False)
    out = monitor.folder / "stdout.txt"
    wait_until(lambda: out.read_text().count(" of 100000") >= 2, "it has looked twice")
    assert "\x1b" not in out.read_text()
    monitor.popen.send_signal(signal.SIGINT)
    assert monitor.wait() == 0, monitor.errors


def test_a_monitor_that_waits_for_a_run_ends_when_asked(
    network: Network, commands: Commands, wait_until: WaitUntil
) -> None:
    monitor = commands.start("monitor", "--json", "--peers", *network.peer().open().addresses)
    wait_until(lambda: "joined a swarm" in monitor.errors, "it looks for a run")
    monitor.popen.send_signal(signal.SIGTERM)
    assert monitor.wait(10) == 130, monitor.errors
    assert (monitor.folder / "stdout.txt").read_text() == ""


def test_what_cannot_be_shown_is_told_with_the_cure(network: Network, capfd: pytest.CaptureFixture[str]) -> None:
    nobody = network.peer().open()

    def fail(code: int, *arguments: str) -> str:
        assert main(["monitor", *arguments]) == code
        lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("joined a swarm")]
        assert len(lines) == 1
        return lines[0]

    assert "name a peer of the swarm to look at" in fail(64)
    there = ["--peers", *nobody.addresses]
    assert "give one of them" in fail(64, "--json", "--web", "0", *there)
    assert "no run x has appeared" in fail(75, "--json", "--run-id", "x", "--set", "swarm.startup_timeout_s=1", *there)
    assert "give PORT or HOST:PORT" in fail(64, "--web", "here", *there)
    nowhere = ["--peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWSu8ReDS9CSCPqdHN8snxzrmXnwGa7U3bhajZvjmdBZdt"]
    for host in ("192.0.2.1", "\xe9..x", "a" * 70, "no such host", "::zz"):  # told before a swarm is looked for
        assert "choose another port" in fail(64, "--web", f"{host}:0", *nowhere)
    for name in ("", " ", "\x1b[2J", "../x", "x" * 65):
        assert "--run-id" in fail(64, "--run-id", name, *nowhere)
