"""Where a replica stands: its outer state, the committed rounds that led there, and the hash that proves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_until_done
from contextlib import contextmanager, suppress
from dataclasses import replace

from torch import Tensor

from opendiloco.background import in_background
from opendiloco.config import Contract
from opendiloco.errors import SwarmError
from opendiloco.ledger import Ledger
from opendiloco.outer import OuterState, genesis_lineage, outer_step, params_hash
from opendiloco.rounds import Position, RoundOutcome


class Standing:
    """The outer state of one worker in the vectors that it shares with its swarm, and what belongs to it.

    The hash is computed off the training thread; nothing changes the state before it is done.
    """

    def __init__(
        self, vectors: Mapping[str, Tensor], contract: Contract, *, tell_hash: Callable[[int, str], None]
    ) -> None:
        """Stand at the beginning of the run, with what `theta` holds.

        Args:
            tell_hash: is told the hash of the state after each round.
        """
        self._config, self._tell_hash = contract.outer, tell_hash
        self.outer = OuterState(vectors["theta"], vectors["momentum"], vectors["second_moment"])
        self.tokens = 0
        """Tokens that all participants trained on in the rounds of this lineage."""
        self.ledger = Ledger()
        """How far they have read the text."""
        self.is_whole = True
        """Whether the state is that of a round: not while it is being replaced, nor after that broke off."""
        self.hash: Future[str] = in_background(lambda: params_hash(self.outer), "params hash")
        self.outer.lineage = genesis_lineage(contract.digest, self.hash.result())

    @property
    def position(self) -> Position:
        """As of the last committed round; without its hash."""
        return Position(self.outer.round, self.outer.lineage, "", self.tokens, self.ledger)

    @property
    def hashed_position(self) -> Position:
        """The same with its hash; waits while that is being computed."""
        return replace(self.position, params_hash=self.hash.result())

    def start_at(self, position: Position, values: Mapping[str, Tensor]) -> None:
        """Stand where a checkpoint left off: its theta, momentum and, with outer adam, second_moment."""
        for name, saved in values.items():
            getattr(self.outer, name).copy_(saved)
        self._move_to(position)
        self.hash = in_background(lambda: params_hash(self.outer), "params hash")

    def commit(self, outcome: RoundOutcome, average: Tensor) -> None:
        """The outer step of a round, on bytes that are the same at every participant."""
        self.hash.result()  # of the state that is about to change
        outer_step(self.outer, average, self._config)
        tokens, ledger = self.tokens + sum(outcome.tokens.values()), self.ledger.after(outcome.readings)
        self._move_to(Position(self.outer.round, outcome.lineage, "", tokens, ledger))

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """While the network process writes another state into the vectors; `arrive` says which one it has become."""
        self.hash.result()  # of the state that may be about to change
        self.is_whole = False
        yield
        self.is_whole = True

    def arrive(self, position: Position) -> None:
        """The vectors hold the state at `position`."""
        self._move_to(position)
        self.announce()

    def announce(self) -> None:
        """Begin to hash the state, for others to know."""
        self.hash = in_background(self._hash_and_tell, "params hash")

    def finish(self) -> None:
        """Wait until the last round has been hashed."""
        wait_until_done([self.hash])

    def _hash_and_tell(self) -> str:
        digest = params_hash(self.outer)
        with suppress(SwarmError):  # the next call says that the network process has ended
            self._tell_hash(self.outer.round, digest)
        return digest

    def _move_to(self, position: Position) -> None:
        self.outer.round, self.outer.lineage = position.round, position.lineage
        self.tokens, self.ledger = position.tokens, position.ledger
