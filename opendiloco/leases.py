"""Which shard of the text a worker reads next. Decisions only: claims come in, as the workers' records have them.

A lease is a claim in its worker's record on the DHT: signed, and over when the record expires. The shards that nobody
is at are dealt out in turn to the participants of the last round, who all know the same ledger, so that their choices
do not meet; the claims keep apart what is left: workers that came later, and different views of who is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from opendiloco.ledger import MAX_READINGS, SOURCE_SHARDS, Ledger, Reading, SourceLedger, source_of
from opendiloco.rounds import leader_order

AHEAD = 4  # shards of each participant that a newcomer leaves alone


def choose_shard(
    ledger: SourceLedger, peer: str, *, shards: int, claims: Mapping[str, Collection[int]], chosen: int
) -> int:
    """The next shard for `peer`: one of every so many that are free, which are its own; the next one where it is taken.

    Args:
        shards: of a pass over the source.
        claims: shards that each live worker, `peer` included, has leased since the last round.
        chosen: how many shards `peer` has chosen since then.
    """
    key, participants = str(ledger.untouched), ledger.readers.keys()
    if peer in participants:
        order, free = leader_order(key, participants), ledger.free()
    else:
        order = leader_order(key, {peer, *claims} - participants)
        free = _out_of_the_way(ledger.free(), AHEAD * len(participants), shards)
    taken = {shard for shards in claims.values() for shard in shards}
    own = islice(free, order.index(peer) + chosen * len(order), None, len(order))
    return next(shard for shard in own if shard not in taken)


def _out_of_the_way(free: Iterator[int], ahead: int, shards: int) -> Iterator[int]:
    """Free shards with the next `ahead` of the pass last, the nearest very last; only then those of the next pass."""
    beyond = next(free)
    pass_end = beyond + shards - beyond % SOURCE_SHARDS % shards
    left = []
    while beyond < pass_end:
        left.append(beyond)
        beyond = next(free)
    yield from (*left[ahead:], *reversed(left[:ahead]), beyond)
    yield from free


def keeps(peer: str, shard: int, rivals: Iterable[str]) -> bool:
    """Whether `peer` goes on with a shard that `rivals` have leased too; all of them decide the same."""
    return leader_order(f"shard {shard}", {peer, *rivals})[0] == peer


class Leases:
    """The shards that one worker has leased."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._chosen = Counter[int]()
        self.claims: list[int] = []
        """Those that it has read or reads now, as far as no committed round says so; the last one of each source is the
        current."""

    def lease(
        self, at: Reading | None, ledger: Ledger, others: Mapping[str, Collection[int]], *, shards: int, source: int = 0
    ) -> Reading:
        """Where to read on in a source.

        Args:
            at: where this worker is; None at the start. When that is done, or another worker's, it is sent elsewhere.
            others: what the other live workers have leased.
            shards: of a pass over the source.
        """
        if at is not None and not at.done and not ledger.is_done(at.shard):
            rivals = [peer for peer, shards in others.items() if at.shard in shards]
            if keeps(self._peer, at.shard, rivals):
                self._claim(at.shard)
                known = ledger.reading(at.shard)
                return known if known is not None and known.place > at.place else at
        claims = {**others, self._peer: self.claims}
        chosen = self._chosen[source]
        shard = choose_shard(ledger.of(source), self._peer, shards=shards, claims=claims, chosen=chosen)
        self._chosen[source] += 1
        self._claim(shard)
        return ledger.reading(shard) or Reading(shard=shard)

    def settle(self, ledger: Ledger) -> None:
        """A round has been committed: what it says to be read need not be claimed any more."""
        self._chosen.clear()
        self.claims = [shard for shard in self.claims if not ledger.is_done(shard)]

    def _claim(self, shard: int) -> None:
        self.claims = [*(claimed for claimed in self.claims if claimed != shard), shard]
        if len(self.claims) > MAX_READINGS:
            newest = {source_of(claimed): claimed for claimed in self.claims}
            self.claims.remove(next(claimed for claimed in self.claims if newest[source_of(claimed)] != claimed))


def read_alone(at: Reading | None, source: int, shards: int) -> Reading:
    """The lease of a worker that has the whole text to itself: shard after shard."""
    if at is None:
        return Reading(shard=source * SOURCE_SHARDS)
    return Reading(shard=at.shard + 1) if at.done else at
