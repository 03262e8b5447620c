"""Which shard of the text a worker reads next. Decisions only: claims come in, as the workers' records have them.

A lease is a claim in its worker's record on the DHT: signed, and over when the record expires. The shards that nobody
is at are dealt out in turn to the participants of the last round, who all know the same ledger, so that their choices
do not meet; the claims keep apart what is left: workers that came later, and different views of who is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from opendiloco.ledger import MAX_READINGS, SOURCE_SHARDS, Ledger, Reading, SourceLedger, source_of
from opendiloco.rounds import leader_order

AHEAD = 4  # shards of each participant that a newcomer leaves alone


def choose_shard(ledger: SourceLedger, peer: str, *, claims: Mapping[str, Collection[int]], chosen: int) -> int:
    """The next shard for `peer`: one of every so many that are free, which are its own; the next one where it is taken.

    Args:
        claims: shards that each live worker, `peer` included, has leased since the last round.
        chosen: how many shards `peer` has chosen since then.
    """
    key, participants = str(ledger.untouched), ledger.readers.keys()
    if peer in participants:
        order, start = leader_order(key, participants), 0
    else:  # out of the way of those who will need the next ones
        order, start = leader_order(key, {peer, *claims} - participants), AHEAD * len(participants)
    start += order.index(peer) + chosen * len(order)
    taken = {shard for shards in claims.values() for shard in shards}
    return next(shard for shard in islice(ledger.free(), start, None, len(order)) if shard not in taken)


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
        self, at: Reading | None, ledger: Ledger, others: Mapping[str, Collection[int]], *, source: int = 0
    ) -> Reading:
        """Where to read on in a source.

        Args:
            at: where this worker is; None at the start. When that is done, or another worker's, it is sent elsewhere.
            others: what the other live workers have leased.
        """
        if at is not None and not at.done and not ledger.is_done(at.shard):
            rivals = [peer for peer, shards in others.items() if at.shard in shards]
            if keeps(self._peer, at.shard, rivals):
                self._claim(at.shard)
                known = ledger.reading(at.shard)
                return known if known is not None and known.place > at.place else at
        claims = {**others, self._peer: self.claims}
        shard = choose_shard(ledger.of(source), self._peer, claims=claims, chosen=self._chosen[source])
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


def read_alone(at: Reading | None, source: int = 0) -> Reading:
    """The lease of a worker that has the whole text to itself: shard after shard."""
    if at is None:
        return Reading(shard=source * SOURCE_SHARDS)
    return Reading(shard=at.shard + 1) if at.done else at
