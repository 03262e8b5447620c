"""Fast and slow workers in one swarm: in rounds of a fixed length each does what it can, and counts for that much."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.commands import Commands
    from support.peers import Network
    from support.waiting import WaitUntil

pytestmark = pytest.mark.timing

ROUNDS, LENGTH_S = 4, 2.0


def test_a_slow_worker_does_fewer_steps_and_nobody_waits_for_it(
    network: Network, commands: Commands, wait_until: WaitUntil
) -> None:
    contract = commands.contract(rounds=ROUNDS, start_peers=2, deadline=LENGTH_S, weighting="tokens")
    bootstrap = network.peer().open()
    fast, slow = (commands.worker(bootstrap.addresses, contract) for _ in range(2))
    wait_until(lambda: slow.events("join") or slow.popen.poll() is not None, "the second worker is there")
    while slow.popen.poll() is None and fast.popen.poll() is None:  # others use its machine most of the time
        slow.popen.send_signal(signal.SIGSTOP)
        time.sleep(0.4)
        slow.popen.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    assert [worker.wait() for worker in (fast, slow)] == [0, 0], slow.errors
    ours, theirs = ([e for e in worker.events("round") if e["verdict"] == "commit"] for worker in (fast, slow))
    assert [event["params_hash"] for event in ours] == [event["params_hash"] for event in theirs]
    assert len(ours) == ROUNDS
    names = [worker.events("join")[0]["peer"] for worker in (fast, slow)]
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert mine["weights"] == {names[0]: float(mine["tokens"]), names[1]: float(other["tokens"])}
        assert mine["inner_steps"] > 1.5 * other["inner_steps"] > 0
        assert LENGTH_S - 0.5 < mine["inner_s"] < LENGTH_S + 1  # validation is not part of it
        assert mine["wait_s"] < LENGTH_S
