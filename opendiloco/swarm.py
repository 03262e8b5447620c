"""The trainer's handle on the swarm: starts and owns this peer's network process and asks it for rounds."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from opendiloco import guard
from opendiloco.addresses import AddressFiles
from opendiloco.channel import Caller
from opendiloco.config import Contract, SwarmConfig
from opendiloco.errors import OpendilocoError, SettingsError, SwarmError
from opendiloco.evaluation import EvaluationPart
from opendiloco.identity import Identity, peer_seed
from opendiloco.leave import POLL_S, Leave, LeaveRequest, wait_for
from opendiloco.ledger import Reading
from opendiloco.phase import PhaseReport
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.shared import create_shared_memory, map_vectors

CLOSE_TIMEOUT_S = 3.0
ANSWER_LIMIT_S = 60.0
RUNS_POLL_S = 0.5
STDERR = 2

logger = logging.getLogger(__name__)


class Swarm:
    """One peer's membership of a swarm. Use it as a context manager, or call `close`.

    Methods may be called from any thread.
    """

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
        self._identity = _identity(config, folder)
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

    @classmethod
    @contextlib.contextmanager
    def join(cls, config: SwarmConfig, folder: Path) -> Iterator[Self]:
        """An open swarm for a program of one's own; FOLDER/addresses is what others join through.

        SIGINT, SIGTERM or SIGHUP asks to leave in order. Before the training loop has begun they end the process, with
        exit code 0.
        """
        leaving = LeaveRequest()
        try:
            with (
                leaving,
                cls(config, folder, leaving=leaving) as swarm,
                AddressFiles(folder / "addresses") as addresses,
            ):
                swarm.open()
                addresses.write(swarm.addresses)
                yield swarm
        except Leave as leave:
            raise SystemExit(str(leave) or 0) from None
        except SwarmError:
            if not leaving():
                raise
            raise SystemExit(0) from None

    @property
    def seed(self) -> int:
        """A seed of this peer's own, below 2**32, so that workers shuffle their data each in another way."""
        return peer_seed(self.peer_id)

    def leaving(self) -> bool:
        """Whether the user wants this worker to leave."""
        return self._leaving()

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

    # --- the run -----------------------------------------------------------------------------------------

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
            runs: dict[str, list[Contract]] = self._wait(self._caller.start("find_runs", with_workers))
            if run_id is None and len(runs) > 1:
                raise SettingsError(f"the swarm has runs {', '.join(sorted(runs))}: choose one with --run-id")
            found = next(iter(runs.values()), []) if run_id is None else runs.get(run_id, [])
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

    def runs(self) -> list[str]:
        """Ids of the runs on this DHT that have workers."""
        return sorted(self._call("find_runs", True))

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """fp32 vectors in memory shared with the network process, zero at first, by name."""
        self._sizes = dict(sizes)
        return map_vectors(self._memory, self._sizes)

    def enter(self, contract: Contract, layout: str, position: Position) -> None:
        """Become a worker of the run, with the outer state in shared memory standing at `position`."""
        self._call("enter", contract, layout, self._sizes, position)

    def catch_up(self) -> Future[Recovery]:
        """Bring the outer state in shared memory to the head of the swarm's lineage, if that is not here."""
        return self._caller.start("catch_up")

    def begin_phase(self, *, following: bool, steps: int) -> None:
        """Training begins, or begins again, with so many inner steps behind it."""
        self._call("begin_phase", following, steps)

    def wait_for_start(self) -> Future[int]:
        """Wait until the run's first round may start; gives the number of workers that are there.

        0: the swarm is further than this worker, which must catch up first.

        The future raises SettingsError when others of the run have another contract, model or initial parameters.
        """
        return self._caller.start("wait_for_start")

    def report(self, report: PhaseReport) -> None:
        """Tell the swarm how far this worker's inner phase is; does not wait."""
        self._caller.start("report", report)

    def lease(self, at: Reading | None, source: int, shards: int) -> Reading:
        """Where to read on in a source, for a worker that is at `at`: there, or in another shard of the text."""
        reading: Reading = self._call("lease", at, source, shards)
        return reading

    def average(self, request: RoundRequest) -> Future[RoundOutcome]:
        """One attempt at the round with the pseudo-gradient in shared memory (see `allocate`)."""
        return self._caller.start("average", request)

    def committed(self, position: Position) -> None:
        """Announce the state after a committed round."""
        self._call("committed", position)

    def set_params_hash(self, round: int, params_hash: str) -> None:
        """Announce the hash of the state after `round`; does not wait."""
        self._caller.start("set_params_hash", round, params_hash)

    def share_evaluation(self, part: EvaluationPart, peers: tuple[str, ...]) -> Future[Mapping[str, EvaluationPart]]:
        """Tell what this worker's part of an evaluation came to; gives the parts of `peers` that come in time."""
        return self._caller.start("share_evaluation", part, peers)

    def withdraw(self) -> None:
        """Give a running `average` up (verdict skip), unless its all-reduce has begun."""
        self._call("withdraw")

    def awaited(self) -> str:
        """Whom the round waits for, in words."""
        words: str = self._call("awaited")
        return words

    # --- the end -----------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Announce that this worker goes. The network may be gone already: then nobody is told."""
        if self._is_silent or not self._opening.done():
            return
        try:
            self._caller.call("leave", timeout_s=CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("nobody could be told that this worker leaves")
        except SwarmError:
            return  # there is no network process, which is why this worker ends

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
        if kind is None:
            self._wait_for_others()
        if kind is None or issubclass(kind, (OpendilocoError, Leave)):
            self.leave()  # others need not wait for this peer's record to expire
        self.close()

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

    def _wait(self, future: Future[Any]) -> Any:
        return wait_for(future, self._leaving)

    def _wait_for_others(self) -> None:
        """Others may need the last round from here, unless the user wants to leave."""
        with contextlib.suppress(SwarmError, Leave):
            if self._opening.done() and not self._leaving():
                self._wait(self._caller.start("wait_for_others"))

    def _explain_end(self) -> str:
        where = f"in {self._log_file}" if self._log_file else "above"
        return f"the network process of this peer has ended: the reason is {where}"


def _identity(config: SwarmConfig, folder: Path | None) -> Identity:
    if config.identity:
        return Identity.load_or_create(Path(config.identity))
    return Identity.load_or_create(folder / "identity.key") if folder is not None else Identity.temporary()
