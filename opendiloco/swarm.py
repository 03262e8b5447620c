"""The trainer's handle on the swarm: a peer that takes part in a run, and is asked for rounds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from opendiloco.addresses import AddressFiles
from opendiloco.claims import News
from opendiloco.config import Contract, SwarmConfig
from opendiloco.errors import OpendilocoError, SwarmError
from opendiloco.evaluation import EvaluationPart
from opendiloco.identity import peer_seed
from opendiloco.leave import Leave, LeaveRequest
from opendiloco.ledger import Reading
from opendiloco.peer import CLOSE_TIMEOUT_S, Peer
from opendiloco.phase import PhaseReport
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.shared import map_vectors

logger = logging.getLogger(__name__)


class Swarm(Peer):
    """One peer's membership of a swarm. Use it as a context manager, or call `close`.

    Methods may be called from any thread.
    """

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

    # --- the run -----------------------------------------------------------------------------------------

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

    def tell(self, news: News) -> None:
        """Something for those who only look at the swarm; does not wait."""
        self._caller.start("tell", news)

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._wait_for_others()
        if kind is None or issubclass(kind, (OpendilocoError, Leave)):
            self.leave()  # others need not wait for this peer's record to expire
        self.close()

    def _wait_for_others(self) -> None:
        """Others may need the last round from here, unless the user wants to leave."""
        with contextlib.suppress(SwarmError, Leave):
            if self._opening.done() and not self._leaving():
                self._wait(self._caller.start("wait_for_others"))
