"""A worker's part in the rounds of its run: gather, all-reduce, log, and what to do when it is not a commit."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from torch import Tensor

from opendiloco.allreduce import Attempt, Group
from opendiloco.donor import Donor
from opendiloco.groups import Groups
from opendiloco.outer import next_lineage
from opendiloco.presence import Presence
from opendiloco.recovery import Recoverer
from opendiloco.rendezvous import Assembly, Rendezvous, RoundCall
from opendiloco.roundlog import LogEntry
from opendiloco.rounds import Position, RoundOutcome, RoundRequest, after_failure, time_limit_s
from opendiloco.wire import WireError

CHECK_S = 0.25  # how often a wait for a group looks whether it still makes sense
DECISION_POLL_S = 0.1
MAX_LOST = 3  # answers of one peer: connections may break, but the survivors of a dead one want to go on


class Participation:
    """Carries out one attempt at a time; verdicts come from `rounds`."""

    def __init__(
        self,
        presence: Presence,
        rendezvous: Rendezvous,
        groups: Groups,
        donor: Donor,
        recoverer: Recoverer,
        *,
        values: Tensor,  # uint8 [wire_bytes(N)]: this worker's pseudo-gradient, encoded
        average: Tensor,  # fp32 [N]: the outer gradient, after a commit
        reduces: bool,
    ) -> None:
        """Args: `reduces` is whether others can reach this worker, so that it can average a slice for them."""
        self._presence, self._rendezvous, self._groups = presence, rendezvous, groups
        self._donor, self._recoverer = donor, recoverer
        self._values, self._average, self._reduces = values, average, reduces
        self._gathering: asyncio.Task[Assembly] | None = None
        self._dropped: dict[str, set[str]] = {}  # group key -> peers that dropped out of its attempts
        self._last_group = b""
        self.committed_by: list[str] = []
        """Members of the last group that have committed the round, where this worker's attempt failed."""

    async def average(self, request: RoundRequest) -> RoundOutcome:
        """One attempt at the round.

        Raises:
            OpendilocoError: this worker must not go on (see `Presence.fatal`).
        """
        if self._presence.fatal is not None:
            raise self._presence.fatal
        self.committed_by = []
        self._presence.watch.asks()
        if request.weight:
            self._presence.arrive()
        else:
            self._presence.follow()
        try:
            return await self._attempt(request)
        finally:
            self._presence.watch.answered()

    async def _attempt(self, request: RoundRequest) -> RoundOutcome:
        started = time.monotonic()
        found = await self._gather(request)
        gathering_s = time.monotonic() - started
        if isinstance(found, RoundOutcome):
            return replace(found, wait_s=gathering_s)
        return await self._reduce(found, gathering_s)

    def withdraw(self) -> None:
        """Give a running attempt up, unless its all-reduce has begun."""
        if self._gathering is not None:
            self._gathering.cancel()

    async def _gather(self, request: RoundRequest) -> Assembly | RoundOutcome:
        """The group of the round, or what the attempt came to without one."""
        presence, key = self._presence, self._presence.outlook().key
        await presence.refresh(at_once=True)
        if (verdict := self._without_group()) is not None:
            return verdict
        if key not in self._dropped:
            self._dropped = {key: set()}
        call = RoundCall(
            key,
            request.weight,
            request.tokens,
            request.readings,
            self._groups.bandwidth if self._reduces and request.weight else 0.0,
            frozenset(self._dropped[key]),
            self._last_group,
        )
        self._gathering = gathering = asyncio.create_task(self._rendezvous.gather(call))
        try:
            while True:
                await asyncio.wait({gathering}, timeout=CHECK_S)
                if gathering.cancelled():
                    return RoundOutcome(verdict="skip", reason="withdrawn")
                if gathering.done():
                    return gathering.result()
                if (verdict := self._without_group()) is not None:
                    return verdict
        finally:
            gathering.cancel()

    def _without_group(self) -> RoundOutcome | None:
        """Why this worker need not wait for a group, if so."""
        presence = self._presence
        if presence.fatal is not None:
            raise presence.fatal
        if (ahead := presence.ahead()) is not None:
            return RoundOutcome(verdict="resync", reason=ahead)
        if not presence.outlook().candidates:
            return RoundOutcome(verdict="skip", reason="nobody is there to follow")
        return None

    async def _reduce(self, assembly: Assembly, gathering_s: float) -> RoundOutcome:
        group, started = assembly.group, time.monotonic()
        key = self._presence.outlook().key
        self._last_group = group.id
        with self._donor.in_all_reduce(self._presence.position.round + 1):
            attempt = await self._groups.reduce(group, values=self._values, average=self._average)
            outcome = RoundOutcome(
                verdict=attempt.verdict,
                reason="; ".join(f"{peer}: {reason}" for peer, reason in sorted(attempt.failures.items())),
                live=group.live,
                weights=attempt.weights,
                tokens=attempt.tokens,
                readings=attempt.readings,
                digest=attempt.digest,
                failures=attempt.failures,
                wait_s=assembly.wait_s,
                rendezvous_s=max(0.0, gathering_s - assembly.wait_s),
                allreduce_s=time.monotonic() - started,
                sent_bytes=attempt.sent_bytes,
                received_bytes=attempt.received_bytes,
                share=sum(member.share for member in group.members if member.peer == self._presence.peer),
            )
            if attempt.verdict == "commit":
                return replace(outcome, lineage=self._log(attempt, group))
        self._dropped.setdefault(key, set()).update(attempt.failures)
        self.committed_by = await self._committed_by(group)
        verdict, reason = after_failure(attempt.failures, committed_by=self.committed_by)
        return replace(outcome, verdict=verdict, reason=reason)

    def _log(self, attempt: Attempt, group: Group) -> str:
        """Keep a committed round for others to fetch; returns its lineage."""
        before = self._presence.position
        lineage = next_lineage(
            before.lineage,
            round=before.round + 1,
            weights=attempt.weights,
            tokens=attempt.tokens,
            readings=attempt.readings,
            average_digest=attempt.digest,
        )
        entry = LogEntry(
            round=before.round + 1,
            before=before.lineage,
            lineage=lineage,
            weights=attempt.weights,
            tokens=attempt.tokens,
            readings=attempt.readings,
            digest=attempt.digest,
            parts=attempt.parts,
        )
        self._presence.participants = frozenset(group.peers) - attempt.failures.keys() | attempt.weights.keys()
        self._donor.hold()  # until the trainer has done the outer step
        self._donor.remember(entry, attempt.payload)
        return lineage

    async def _committed_by(self, group: Group) -> list[str]:
        """Members of a group that failed here which have committed the round; waits while one may still do so."""
        position, others = self._presence.position, [peer for peer in group.peers if peer != self._presence.peer]
        limit_s = time_limit_s(self._values.numel() * len(group.members))  # of the others' attempts
        answers = await asyncio.gather(*(self._ask_until_decided(peer, position, limit_s) for peer in others))
        return [peer for peer, has_committed in zip(others, answers, strict=True) if has_committed]

    async def _ask_until_decided(self, peer: str, position: Position, limit_s: float) -> bool:
        """Whether a peer has committed; one that cannot be asked may have, and is asked again if it seems to live."""
        give_up, lost = time.monotonic() + limit_s, 0
        while time.monotonic() <= give_up:
            try:
                answer = await self._recoverer.has_round(peer, position.round + 1, position.lineage)
            except WireError:
                lost += 1
                answer = None if lost < MAX_LOST and self._presence.is_heard_of(peer) else False
            if answer is not None:
                return answer
            await asyncio.sleep(DECISION_POLL_S)
        return False
