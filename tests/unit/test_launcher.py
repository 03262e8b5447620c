"""A process leaves when torchrun, which started it, has ended, also before it could look."""

from __future__ import annotations

import socket
import threading

from opendiloco.launcher import has_launcher, leave_with_launcher


def environment(port: int) -> dict[str, str]:
    """What torchrun says to its first process."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", **store}


def test_torchrun_is_there_as_long_as_its_store_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert has_launcher(environment(port))
    assert not has_launcher(environment(port))
    assert has_launcher({**environment(port), "TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_a_process_whose_torchrun_ended_before_it_looked_leaves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
    left = threading.Event()
    leave_with_launcher(environment(port), leave=left.set)
    assert left.wait(30)


def test_a_process_without_torchrun_watches_nobody() -> None:
    threads = threading.active_count()
    leave_with_launcher({})
    assert threading.active_count() == threads
