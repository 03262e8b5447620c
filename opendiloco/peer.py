"""A handle on a peer: starts and owns its network process, which joins the DHT, and asks it what is there."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from opendiloco import guard
from opendiloco.channel import Caller
from opendiloco.claims import Seen
from opendiloco.config import Contract, SwarmConfig
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.identity import Identity
from opendiloco.leave import POLL_S, Leave, wait_for
from opendiloco.shared import create_shared_memory

CLOSE_TIMEOUT_S = 3.0
ANSWER_LIMIT_S = 60.0
RUNS_POLL_S = 0.5
STDERR = 2

logger = logging.getLogger(__name__)


class Peer:
    """One peer, in no run. Use it as a context manager, or call `close`. Methods may be called from any thread."""

    def __init__(
        self, config: SwarmConfig, folder: Path | None, *, leaving: Callable[[], bool] = lambda: False
    ) -> None:
        """Start the network process, which begins to join the DHT.

        Args:
            folder: takes the identity file and log.txt; without one, in which nobody can train, the key is new each
                time and the log goes to standard error.
            leaving: whether the user wants to leave; waits of this object then raise `Leave`.

        Raises:
            SettingsError: a key file that cannot be used; client mode and nobody to connect to.
        """
        if config.client_mode and not config.peers:
            raise SettingsError(
                "swarm.client_mode is true and swarm.peers is empty: nobody can reach this peer, so it must be told "
                "whom to reach, with --peers ADDRESS"
            )
        self._leaving, self._is_silent, self._joins = leaving, False, bool(config.peers)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._identity = Identity.choose(config.identity, folder)
        self._log_file = folder / "log.txt" if folder is not None else None
        self._memory = create_shared_memory()
        key_lock = self._identity.claim()
        self.peer_id = self._identity.peer_id
        self.addresses: list[str] = []
        try:
            self._start_process(key_lock, (config, self._identity.path, folder))
        finally:
            os.close(key_lock)  # the guard holds it from here on
        self._opening = self._caller.start("open")

    def open(self) -> None:
        """Wait until this peer is on the DHT; `addresses` are its full addresses then.

        Raises:
            SettingsError: an address, port or clock that cannot work.
            SwarmError: none of the configured peers answers in time.
        """
        self.addresses = self._wait(self._opening)
        how = "joined a swarm" if self._joins else "started a swarm, which others join through this peer"
        logger.info("%s, as %s", how, self.peer_id)

    def leaving(self) -> bool:
        """Whether the user wants this worker to leave."""
        return self._leaving()

    def find_contract(self, run_id: str | None, *, wait_s: float, with_workers: bool = True) -> Contract | None:
        """The contract of run `run_id`, or of the only run there is; None when this swarm has no such run.

        Args:
            wait_s: how long to wait for a run to appear; others may be just starting.
            with_workers: a run whose workers have all gone is none.

        Raises:
            SettingsError: there are several runs and `run_id` names none, or its peers disagree on the contract.
        """
        give_up = time.monotonic() + wait_s
        while True:
            runs = self.runs(run_id, with_workers=with_workers)
            if run_id is None and len(runs) > 1:
                raise SettingsError(f"the swarm has runs {', '.join(sorted(runs))}: choose one with --run-id")
            found = next(iter(runs.values()), [])
            if len(found) > 1:
                digests = ", ".join(contract.digest[:12] for contract in found)
                raise SettingsError(f"run {run_id} has several contracts ({digests}): choose another run.id")
            if found:
                return found[0]
            if time.monotonic() >= give_up:
                return None
            if self._leaving():
                raise Leave
            time.sleep(RUNS_POLL_S)

    def runs(self, run_id: str | None = None, *, with_workers: bool = True) -> dict[str, list[Contract]]:
        """Contracts by run id, more than one where its peers disagree; of runs that have workers, or of all."""
        found: dict[str, list[Contract]] = self._ask("find_runs", run_id, with_workers)
        return found

    def observe(self, run_id: str) -> dict[str, Seen]:
        """All that is on the DHT of the workers of a run, by peer id; this peer need not be one of them."""
        seen: dict[str, Seen] = self._ask("observe", run_id)
        return seen

    def clock_offset(self, peer: str) -> float | None:
        """See `Onlooker.clock_offset`."""
        offset_s: float | None = self._ask("clock_offset", peer)
        return offset_s

    def download(self, peer: str, contract: Contract, numel: int, vectors: int) -> float | None:
        """See `Onlooker.download`."""
        rate: float | None = self._ask("download", peer, contract, numel, vectors)
        return rate

    def upload(self, peer: str) -> float | None:
        """See `Onlooker.upload`."""
        rate: float | None = self._ask("upload", peer)
        return rate

    def check(self) -> None:
        """Raise SwarmError when the network process has ended."""
        if self._guard.poll() is not None:
            raise SwarmError(self._explain_end())

    def close(self) -> None:
        """Stop the network process and wait until nothing of it is left. May be called twice."""
        if self._memory < 0:
            return
        self._caller.hang_up()
        assert self._guard.stdin is not None
        if self._opening.done():  # else it may still be importing, and nobody knows it yet
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(CLOSE_TIMEOUT_S)
        self._guard.stdin.close()  # makes a guard that is still there stop the network process itself
        self._guard.wait()
        self._caller.close()
        os.close(self._memory)
        self._memory = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start_process(self, key_lock: int, what: tuple[SwarmConfig, Path | None, Path | None]) -> None:
        """Spawn the network process under its guard, which outlives this process just long enough to clean up."""
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno(), self._memory, key_lock]
        command = [sys.executable, "-m", "opendiloco.network", str(theirs.fileno()), str(self._memory)]
        with open(self._log_file, "ab") if self._log_file else os.fdopen(os.dup(STDERR), "ab") as log:
            self._guard = subprocess.Popen(
                guard.guard_command(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=inherited,
                env={**os.environ, guard.FDS_VARIABLE: ",".join(map(str, inherited))},
                start_new_session=True,  # Ctrl-C in a terminal reaches the trainer only
            )
        theirs.close()
        connection = Connection(ours.detach())
        connection.send(what)
        self._caller = Caller(connection, explain_end=self._explain_end)

    def _call(self, method: str, *arguments: object) -> Any:
        """A call that is answered at once. SwarmError: the network process is frozen, and that for long enough."""
        future, began = self._caller.start(method, *arguments), time.monotonic()
        while True:
            try:
                return future.result(POLL_S)
            except NotDone:
                if future.done():
                    raise SwarmError(f"the DHT did not answer in time ({method})") from None
                waited_s = time.monotonic() - began
                if waited_s > (CLOSE_TIMEOUT_S if self._leaving() else ANSWER_LIMIT_S):
                    self._is_silent = True
                    raise SwarmError(f"the network process has not answered for {waited_s:.0f} s ({method})") from None

    def _ask(self, method: str, *arguments: object) -> Any:
        """A call that takes seconds; one that a request to leave ends. SwarmError: as in `_call`."""
        future, began = self._caller.start(method, *arguments), time.monotonic()

        def check() -> None:
            if time.monotonic() - began > ANSWER_LIMIT_S:
                self._is_silent = True
                raise SwarmError(f"the network process has not answered for {ANSWER_LIMIT_S:.0f} s ({method})")

        return wait_for(future, self._leaving, meanwhile=check)

    def _wait(self, future: Future[Any]) -> Any:
        return wait_for(future, self._leaving)

    def _explain_end(self) -> str:
        where = f"in {self._log_file}" if self._log_file else "above"
        return f"the network process of this peer has ended: the reason is {where}"
