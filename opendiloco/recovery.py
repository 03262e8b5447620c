"""Getting to where the swarm is: missed rounds from others' logs, or the whole outer state in chunks from many donors.

The outer step is elementwise, so a chunk that belongs to an older round is brought forward on its own by replaying
logged averages. Rounds prove themselves by the lineage; a state that was fetched counts only once its hash is the one
that a worker of the swarm announced for that round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from opendiloco.codec import Codec
from opendiloco.config import OuterConfig
from opendiloco.donor import INNER_VECTORS, STATE_VECTORS, ChunkHeader
from opendiloco.errors import SwarmError
from opendiloco.fetcher import Connect, Fetcher
from opendiloco.forks import GivenUp, given_up
from opendiloco.outer import OuterState, outer_step, params_hash
from opendiloco.roundlog import LogEntry
from opendiloco.rounds import Goal, Position, Recovery
from opendiloco.spare import Spare
from opendiloco.wire import WireError

CHUNK_VALUES = 1 << 16
STREAMS_PER_DONOR = 2
MAX_DONORS = 8
MAX_ATTEMPTS = 5
PAUSE_S = 2.0  # before another attempt: donors have short absences, and others become known
HASH_WAIT_S = 20.0
POLL_S = 0.25

logger = logging.getLogger(__name__)


class _Failed(Exception):
    """This attempt at recovering came to nothing; the message says why."""


class Recoverer:
    """Brings the outer state in shared memory to the head of the swarm's lineage."""

    def __init__(
        self,
        vectors: Mapping[str, Tensor],
        codec: Codec,
        outer: OuterConfig,
        *,
        peer: str,
        connect: Connect,
        find_goal: Callable[[Position], Awaitable[Goal | None]],
        doubt: Callable[[Position, str], bool],
        announced_hash: Callable[[Position], str | None],
        remember: Callable[[LogEntry, list[memoryview]], None],
        history: Callable[[str], list[tuple[int, str]]],
        folder: Path,
        patience_s: Callable[[], float],
    ) -> None:
        """Prepare to recover.

        Args:
            peer: this worker.
            find_goal: where the swarm is, if not here.
            doubt: passes over those who claim a place, for a reason; see `Doubts.about`.
            announced_hash: what others say of a state.
            history: the logged rounds that led to a lineage, newest first, each with the lineage before it.
            folder: takes this worker's own state while another one is fetched.
            patience_s: how long, in seconds, donors that have died may still be in sight.
        """
        self._peer, self._history = peer, history
        self._folder, self._patience_s = folder, patience_s
        self._codec, self._outer = codec, outer
        self._find_goal, self._doubt = find_goal, doubt
        self._announced_hash, self._remember = announced_hash, remember
        self._vectors = [vectors[name] for name in STATE_VECTORS]
        self._inner = [vectors[name] for name in INNER_VECTORS if name in vectors]
        self._average = vectors["average"]
        self._numel = self._average.numel()
        self._new_fetcher = partial(Fetcher, connect, codec, self._average, [*self._vectors, *self._inner])
        self._fetcher = self._new_fetcher()
        self._way: tuple[Position, Position] | None = None

    @property
    def progress(self) -> str:
        """How far a catching up is, in words; empty where none is going on."""
        if self._way is None:
            return ""
        position, goal = self._way
        here = f"of round {position.round}" if position.lineage else "of no use"
        received = f"{self._fetcher.received_bytes / 1e6:.1f} MB have been fetched"
        return f"this worker catches up: the swarm is at round {goal.round}, its own state is {here}, {received}"

    async def catch_up(self, start: Position, holders: Sequence[str] = ()) -> Recovery:
        """Move the state from `start` to the head; returns where that is and what it took.

        Args:
            holders: peers that have the next round, whether or not they have announced it yet.

        Raises:
            SwarmError: no donor could provide a state that checks out.
        """
        self._fetcher = self._new_fetcher()
        self._replayed, self._full_state = 0, False
        self._given_up, self._has_own_work, self._was_false = GivenUp(), False, False
        self._start, self._attempts = start, 0
        self._own: tuple[Position, Spare] | None = None
        try:
            return await self._catch_up(holders)
        finally:
            self._way = None
            self._let_go()

    async def _catch_up(self, holders: Sequence[str]) -> Recovery:
        position, began = self._start, time.monotonic()
        give_up = began + self._patience_s()
        if holders:
            position = await self._replay_one(position, holders) or position
        while True:
            try:
                position = await self._approach(position)
                if not position.lineage:
                    raise _Failed("nobody who has it is left")
                if self._full_state:
                    position = await self._confirm(position)
            except _Failed as failure:
                self._attempts += 1
                logger.warning("recovery starts over: %s", failure)
                position = await asyncio.to_thread(self._go_back)
                if self._attempts >= MAX_ATTEMPTS and (not position.lineage or time.monotonic() > give_up):
                    self._pass_over(failure)
                    self._attempts = 0
                await asyncio.sleep(PAUSE_S)
                continue
            return Recovery(
                position=position,
                donors=tuple(sorted(self._fetcher.used)),
                received_bytes=self._fetcher.received_bytes,
                seconds=time.monotonic() - began,
                rounds_replayed=self._replayed,
                full_state=self._full_state,
                given_up=self._given_up.count,
                is_given_up_exact=self._given_up.is_exact,
                has_own_work=self._has_own_work,
            )

    def _pass_over(self, failure: _Failed) -> None:
        """Give up what all attempts were about; raises SwarmError where this worker must not go on without it."""
        if self._way is None or not self._doubt(self._way[1], str(failure)):
            raise SwarmError(f"the state of the run could not be fetched ({failure}): start this worker again")

    def _go_back(self) -> Position:
        """The place where the state was whole before another one was fetched; where it is lost, one that is of no use.

        The swarm need not be there any more when the next attempt begins: a worker that has a state goes on with it.
        """
        self._full_state, self._given_up = False, GivenUp()
        self._fetcher.used.clear()
        own, self._own = self._own, None
        if own is not None and own[1].restore():
            return own[0]
        return Position(self._start.round, "", "", tokens=-1)  # anything is heavier

    def _let_go(self) -> None:
        if self._own is not None:
            self._own[1].close()
            self._own = None

    async def _approach(self, position: Position) -> Position:
        """Replay or fetch until nobody is ahead."""
        while (goal := await self._find_goal(position)) is not None:
            self._way = position, goal.position
            following = None
            if position.lineage and self._is_replay_cheaper(goal.position.round - position.round):
                following = await self._replay_one(position, goal.donors)
            if following is not None:
                position = following
            else:
                if position == self._start:
                    history = await asyncio.to_thread(self._history, position.lineage)
                    self._given_up = await given_up(self._fetcher.fate_of, goal.donors, position, history)
                if position.round and position.lineage and not self._full_state:  # this worker's own, and worth it
                    self._own = position, Spare([*self._vectors, *self._inner], self._folder)
                position = await self._fetch_state(self._chosen(goal.donors))
                if position.tokens < goal.position.tokens:
                    raise _Failed("the donors are behind what they announced")
        return position

    def _chosen(self, donors: Sequence[str]) -> Sequence[str]:
        """As many as help; once their chunks made a false state, one after the other: who gave what is not known."""
        if not self._was_false or not donors:
            return donors[:MAX_DONORS]
        return [donors[self._attempts % len(donors)]]

    def _is_replay_cheaper(self, rounds: int) -> bool:
        """Than fetching theta and momentum; with int8 up to seven missed rounds are."""
        state_bytes = 4 * sum(vector.numel() for vector in (*self._vectors, *self._inner))
        return rounds * self._codec.wire_bytes(self._numel) <= state_bytes

    async def _confirm(self, position: Position) -> Position:
        """Wait until somebody has announced the hash of this round (or of one that can be replayed to)."""
        for _ in range(int(HASH_WAIT_S / POLL_S)):
            announced = self._announced_hash(position)
            if announced is not None:
                found = await asyncio.to_thread(params_hash, self._state(position, slice(None)))
                if found != announced:
                    self._was_false = True
                    raise _Failed(f"the state of round {position.round} has another hash than the swarm announced")
                return replace(position, params_hash=found)
            await asyncio.sleep(POLL_S)
            position = await self._approach(position)
        raise _Failed(f"nobody announced the hash of round {position.round}")

    # --- rounds ------------------------------------------------------------------------------------------

    async def has_round(self, peer: str, round: int, before: str) -> bool | None:
        """See `Fetcher.has_round`."""
        return await self._fetcher.has_round(peer, round, before)

    async def _replay_one(self, position: Position, donors: Sequence[str]) -> Position | None:
        """Apply the next round on this lineage to the whole state, if a donor has it."""
        entry = await self._fetch_round(position.round + 1, position.lineage, donors)
        if entry is None:
            return None
        await asyncio.to_thread(outer_step, self._state(position, slice(None)), self._average, self._outer)
        self._replayed += 1
        tokens = position.tokens + sum(entry.tokens.values())
        return Position(entry.round, entry.lineage, "", tokens, position.ledger.after(entry.readings))

    async def _fetch_round(self, round: int, before: str, donors: Sequence[str]) -> LogEntry | None:
        found = await self._fetcher.round(round, before, donors)
        if found is None:
            return None
        entry, payload = found
        self._remember(entry, [payload])
        self._has_own_work |= entry.before == self._start.lineage and self._peer in entry.weights
        return entry

    # --- the whole state ---------------------------------------------------------------------------------

    async def _fetch_state(self, donors: Sequence[str]) -> Position:
        """Fetch all chunks from several donors at once, then bring those forward that are behind."""
        self._full_state = True
        waiting = deque(range(0, self._numel, CHUNK_VALUES))
        tags: dict[int, ChunkHeader] = {}
        remaining = list(donors)
        while waiting and remaining:
            pulls = [self._pull(donor, waiting, tags) for donor in remaining for _ in range(STREAMS_PER_DONOR)]
            fine = await asyncio.gather(*pulls)
            remaining = [donor for index, donor in enumerate(remaining) if all(fine[index * 2 : index * 2 + 2])]
        if waiting or not donors:
            raise _Failed("every donor failed before all chunks were there")
        position = await self._align(tags, donors)
        if (ledger := await self._fetcher.ledger(donors)) is None:
            raise _Failed("no donor says how far the text has been read")
        return replace(position, ledger=ledger)

    async def _pull(self, donor: str, waiting: deque[int], tags: dict[int, ChunkHeader]) -> bool:
        """Fetch chunks from one donor while there are any; False when it failed (its chunk waits again)."""
        taken: set[int] = set()

        def take() -> slice | None:
            if not waiting:
                return None
            taken.add(start := waiting.popleft())
            chunk = self._chunk(start)
            if self._own is not None:
                self._own[1].keep(chunk)
            return chunk

        try:
            async with contextlib.aclosing(self._fetcher.chunks(donor, take)) as chunks:
                async for chunk, header in chunks:
                    tags[chunk.start] = header
                    taken.discard(chunk.start)
        except WireError as error:
            logger.info("donor %s: %s", donor, error)
            waiting.extend(taken)
            return False
        return True

    async def _align(self, tags: dict[int, ChunkHeader], donors: Sequence[str]) -> Position:
        """Replay logged rounds for the chunks that are behind the newest one."""
        lineages = {tag.round: tag.lineage for tag in tags.values()}
        if any(lineages[tag.round] != tag.lineage for tag in tags.values()):
            raise _Failed("donors are on different lineages")
        newest = max(tags.values(), key=lambda tag: tag.round)
        lineage = lineages[min(lineages)]
        for round in range(min(lineages) + 1, newest.round + 1):
            entry = await self._fetch_round(round, lineage, donors)
            if entry is None or lineages.get(round, entry.lineage) != entry.lineage:
                raise _Failed(f"round {round} is not in any donor's log")
            for start, tag in tags.items():
                if tag.round == round - 1:
                    await asyncio.to_thread(self._step_chunk, start, round - 1)
                    tags[start] = tag.model_copy(update={"round": round})
            lineage = entry.lineage
            self._replayed += 1
        return Position(newest.round, newest.lineage, "", newest.tokens)

    def _step_chunk(self, start: int, round: int) -> None:
        chunk = self._chunk(start)
        outer_step(self._state(Position(round, "", ""), chunk), self._average[chunk], self._outer)

    def _chunk(self, start: int) -> slice:
        return slice(start, min(start + CHUNK_VALUES, self._numel))

    def _state(self, position: Position, chunk: slice) -> OuterState:
        theta, momentum, second_moment = self._vectors
        return OuterState(
            theta[chunk], momentum[chunk], second_moment[chunk], round=position.round, lineage=position.lineage
        )
