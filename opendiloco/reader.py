"""A worker's reader of one source: sequences from the shards that it has leased, and what it has read of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opendiloco.errors import SettingsError
from opendiloco.ledger import SOURCE_SHARDS, Reading
from opendiloco.sequences import Bookmark, Sequences
from opendiloco.tokenizer import Tokens

Lease = Callable[[Reading | None, int, int], Reading]
"""Where to read on: takes where this worker is in a source (None at the start), the source's number and the shards of a
pass over it, gives the same place or one in another shard."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ReaderState:
    """Where a reader stands."""

    bookmark: Bookmark
    finished: tuple[Reading, ...] = ()
    has_begun: bool = False
    has_lease: bool = False


class SourceReader:
    """Reads the `source`-th of a run's sources, endlessly, from the shards that `lease` says."""

    def __init__(self, sequences: Sequences, lease: Lease, *, name: str, source: int, is_one_of_many: bool) -> None:
        """Args: `name` is the source's in data.source."""
        self.name, self._sequences, self._lease, self._source = name, sequences, lease, source
        self._of = f" over {name}" if is_one_of_many else " over the text"
        self._finished: list[Reading] = []
        self._has_begun = self._has_lease = False
        self._pass = 0

    @property
    def shards(self) -> int:
        """Of one pass."""
        return self._sequences.shards

    @property
    def finished(self) -> list[Reading]:
        """The shards read to their end since `renew(reported=True)`, numbered as in the ledger."""
        return [self._in_ledger(reading) for reading in self._finished]

    @property
    def reading(self) -> Reading | None:
        """Where it is, numbered as in the ledger; None if it has not begun."""
        return self._in_ledger(self._sequences.bookmark.reading) if self._has_begun else None

    def begin(self) -> None:
        """Have a lease: at the start, and after each round."""
        if not self._has_lease:
            self._go_to(self._sequences.bookmark.reading if self._has_begun else None)

    def next_sequence(self) -> Tokens:
        """Token ids [seq_len].

        Raises:
            SettingsError: the text cannot be read any more, or a whole pass gave no sequence.
            Leave: while it waited for a thread that reads.
        """
        self.begin()
        empty_shards = 0
        while (sequence := self._sequences.next_sequence()) is None:
            empty_shards += 1
            if empty_shards > 2 * self.shards:
                raise SettingsError(
                    f"data.source {self.name} gave no full sequence in {empty_shards} shards, more than a pass: "
                    "restore its files, or lower data.seq_len"
                )
            done = self._sequences.bookmark.reading
            self._finished.append(done)
            self._go_to(done)
        return sequence

    def renew(self, *, reported: bool) -> None:
        """A round is over; see `TokenStream.renew`."""
        if reported:
            self._finished.clear()
        self._has_lease = False

    @property
    def state(self) -> ReaderState:
        """Where it stands."""
        return ReaderState(self._sequences.bookmark, tuple(self._finished), self._has_begun, self._has_lease)

    def return_to(self, state: ReaderState) -> None:
        """Stand there again."""
        self._sequences.return_to(state.bookmark)
        self._finished = list(state.finished)
        self._has_begun, self._has_lease = state.has_begun, state.has_lease
        self._pass = max(0, state.bookmark.reading.shard // self.shards)

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values."""
        return {"has_begun": self._has_begun, **self._sequences.state_of(self._sequences.bookmark)}

    def state_in(self, state: dict[str, Any]) -> ReaderState:
        """The position that `state_dict` wrote. Raises SettingsError if it is of another source."""
        return ReaderState(self._sequences.bookmark_of(state), has_begun=bool(state["has_begun"]))

    def close(self) -> None:
        """End what reads for it."""
        self._sequences.close()

    def _go_to(self, at: Reading | None) -> None:
        leased = self._lease(at and self._in_ledger(at), self._source, self.shards)
        reading = leased.model_copy(update={"shard": leased.shard - self._source * SOURCE_SHARDS})
        self._has_begun = self._has_lease = True
        self._sequences.go_to(reading)
        if (number := reading.shard // self.shards) > self._pass:
            self._pass = number
            logger.info("pass %d%s begins", number + 1, self._of)

    def _in_ledger(self, reading: Reading) -> Reading:
        return reading.model_copy(update={"shard": reading.shard + self._source * SOURCE_SHARDS})
