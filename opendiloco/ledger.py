"""How far the training text has been read: by each worker in a round, and by all of them together.

The text of a run is one endless order: pass after pass over the source, each cut into the same number of shards, which
are counted on from pass to pass. Every committed round says how far its participants have read, and so all replicas
hold the same ledger, which says what is still to be read. A run may mix several sources; each has an order, shards and
a part of the ledger of its own, and a shard's number says which source it is of.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_READINGS = 32
"""Shards that one worker reports in a round; more are read again by somebody."""
MAX_OPEN = 4096
MAX_SOURCES = 16
SOURCE_SHARDS = 2**32
"""The shards of the i-th source are counted from i times this number on."""

Count = Annotated[int, Field(ge=0, le=2**40)]
PeerName = Annotated[str, Field(min_length=1, max_length=128)]


class Reading(BaseModel):
    """A place in a shard: what comes before it has been trained on."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    shard: Count
    files: Count = 0
    """Files of the shard that have been read to their end, where the text is streamed from files."""
    rows: Count = 0
    """Rows of the next file that have been read."""
    sequences: Count = 0
    """Sequences taken of what follows."""
    done: bool = False
    """Whether the shard has been read to its end."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Of two places in a shard the further one is greater."""
        return self.files, self.rows, self.sequences

    def pack(self) -> bytes:
        """For hashing."""
        return struct.pack("<4Q?", self.shard, *self.place, self.done)


def source_of(shard: int) -> int:
    """Which source a shard is of."""
    return shard // SOURCE_SHARDS


class SourceLedger(BaseModel):
    """What the rounds of a lineage have read of one source, as of the last one."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    untouched: Count = 0
    """Nobody has read any of the shards from this number on."""
    open: tuple[Reading, ...] = Field(default=(), max_length=MAX_OPEN)
    """The shards below it that have not been read to their end, by number."""
    readers: dict[PeerName, Count] = Field(default={}, max_length=MAX_OPEN)
    """The participants of the last round that read text from shards, and the one each of them is at."""

    @model_validator(mode="after")
    def _open_shards_are_some_of_those_touched(self) -> Self:
        numbers = [reading.shard for reading in self.open]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= self.untouched):
            raise ValueError("open shards are not in order, or nobody has touched them")
        return self

    def after(self, readings: Mapping[str, Sequence[Reading]]) -> SourceLedger:
        """The ledger after a round in which each participant has read so far.

        It does not matter if some of it is known already. A number out of proportion is ignored.
        """
        open, untouched = {reading.shard: reading for reading in self.open}, self.untouched
        most = untouched + MAX_OPEN - len(open)
        known = sorted((r for each in readings.values() for r in each if r.shard < most), key=lambda r: r.shard)
        for reading in known:
            for shard in range(untouched, reading.shard + 1):
                open[shard] = Reading(shard=shard)
            untouched = max(untouched, reading.shard + 1)
            if reading.shard not in open:  # read to its end by somebody
                continue
            if reading.done:
                del open[reading.shard]
            elif reading.place > open[reading.shard].place:
                open[reading.shard] = reading
        return SourceLedger(
            untouched=untouched,
            open=tuple(open[shard] for shard in sorted(open)),
            readers={peer: each[-1].shard for peer, each in readings.items() if each},
        )

    def is_done(self, shard: int) -> bool:
        """Whether a shard has been read to its end."""
        return shard < self.untouched and self.reading(shard) is None

    def reading(self, shard: int) -> Reading | None:
        """How far a shard that somebody has begun was read; None for others and those that are done."""
        return next((reading for reading in self.open if reading.shard == shard), None)

    def free(self) -> Iterator[int]:
        """Shards that none of the last round's participants is at: first those that were begun or left out."""
        held = set(self.readers.values())
        yield from (reading.shard for reading in self.open if reading.shard not in held)
        yield from itertools.count(self.untouched)


class Ledger(BaseModel):
    """What the rounds of a lineage have read, as of its last one."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    sources: tuple[SourceLedger, ...] = Field(default=(), max_length=MAX_SOURCES)
    """Of each source; of those at the end nobody has read anything."""

    @model_validator(mode="after")
    def _shards_are_of_their_sources(self) -> Self:
        for source, part in enumerate(self.sources):
            numbers = [part.untouched, *(reading.shard for reading in part.open)]
            if {source_of(number) for number in numbers} != {source}:
                raise ValueError(f"shards of another source in the part of source {source}")
        return self

    @property
    def readers(self) -> frozenset[str]:
        """The participants of the last round that read text from shards."""
        return frozenset(peer for part in self.sources for peer in part.readers)

    def of(self, source: int) -> SourceLedger:
        """What has been read of a source."""
        if source < len(self.sources):
            return self.sources[source]
        return SourceLedger(untouched=source * SOURCE_SHARDS)

    def after(self, readings: Mapping[str, Sequence[Reading]]) -> Ledger:
        """The ledger after a round in which each participant has read so far."""
        seen = {source_of(reading.shard) for each in readings.values() for reading in each}
        count = max([len(self.sources), *(source + 1 for source in seen if source < MAX_SOURCES)])
        parts = [
            self.of(source).after(
                {peer: [r for r in each if source_of(r.shard) == source] for peer, each in readings.items()}
            )
            for source in range(count)
        ]
        return Ledger(sources=tuple(parts))

    def is_done(self, shard: int) -> bool:
        """Whether a shard has been read to its end."""
        return self.of(source_of(shard)).is_done(shard)

    def reading(self, shard: int) -> Reading | None:
        """How far a shard that somebody has begun was read; None for others and those that are done."""
        return self.of(source_of(shard)).reading(shard)
