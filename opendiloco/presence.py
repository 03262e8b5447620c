"""This worker among the others: its own record, kept fresh, and what everybody's records say about its round."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from opendiloco.agreement import Agreement, state_hashes, usual_hash
from opendiloco.claims import Progress, told_after
from opendiloco.config import Contract, SwarmConfig
from opendiloco.connect import TRANSPORT_ERRORS
from opendiloco.doubts import Doubts
from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.evaluation import EvaluationPart
from opendiloco.heartbeat import Heartbeat
from opendiloco.lobby import Outlook
from opendiloco.membership import Membership
from opendiloco.phase import PhaseReport, Watch
from opendiloco.rounds import Goal, Position, group_key
from opendiloco.sight import heaviest, in_sight, is_alike, missing_line, phase_of_others, start_line

CONTRACT_BEATS = 5  # between two looks whether enough copies of the contract are there
REFRESH_S = 0.25  # shortest time between two looks at the DHT, of a small swarm
RENEWED_BEATS = 3  # without a new record, after which a worker that cannot be reached either is taken for dead

logger = logging.getLogger(__name__)


class Presence:
    """A worker's place in its run, from `open` until it leaves."""

    def __init__(
        self,
        membership: Membership,
        config: SwarmConfig,
        contract: Contract,
        layout: str,
        position: Position,
        *,
        reconnect: Callable[[Iterable[str]], Awaitable[None]],
    ) -> None:
        """Args: `reconnect` looks for peers that were known and have been lost."""
        self.contract = contract
        self.participants: frozenset[str] = frozenset()
        """Who got the last committed round: they are about to announce it, whatever their records still say."""
        self.has_started = False
        """Whether the run's first round may start, or has long started."""
        self.inner_s = self.exchange_s = 0.0
        """Length of the last inner phase, and of the last all-reduce."""
        self._is_late, self._doubts = False, Doubts()
        self._refusal: SettingsError | None = None
        self._membership, self._config, self._reconnect = membership, config, reconnect
        self._peer = membership.identity.peer_id
        self._agreement, self._heart = Agreement(contract.run.id, membership), Heartbeat(self.beat_s)
        self.watch, self._has_stopped = Watch(), False  # of this worker's trainer
        self._refreshed = 0.0
        self._phase_started = now = time.time()
        self._own = Progress(
            session=secrets.token_hex(8),
            started=now,
            issued=now,
            contract=contract.digest,
            layout=layout,
            round=position.round,
            lineage=position.lineage,
            params_hash=position.params_hash,
            hashed_round=position.round,
            committed_tokens=position.tokens,
            state="training",
            steps=0,
            tokens_per_s=0.0,
            expected_finish=now + config.expiry_s,
            client_mode=config.client_mode,
            shards=[],
        )
        self._ledger = position.ledger

    async def open(self) -> None:
        """Publish the contract and this worker's record, and keep both alive."""
        self._membership.run_id = self.contract.run.id
        await self._keep_contract()
        await self._announce()
        self._heart.keep_up(self._announce, overlaps=True)  # however slow the DHT, a record is on its way at each beat
        self._heart.keep_up(self._look_around)
        self._heart.keep_up(self._keep_contract, is_vital=False, beats=CONTRACT_BEATS)
        self._heart.keep_up(self._look_for_lost_peers, is_vital=False)

    def beat_s(self) -> float:
        """Seconds between two records of a worker."""
        return self._config.heartbeat_s * self._membership.stretch

    async def close(self) -> None:
        """Stop the heartbeat."""
        await self._heart.close()

    # --- what this worker does ---------------------------------------------------------------------------

    def report(self, report: PhaseReport) -> None:
        """Progress of the inner phase; told to others with the next heartbeat."""
        self.watch.report(report.steps)
        if self._has_stopped:
            self._has_stopped = False
            self._update(state="training")
        steps, speed, finish = report.steps, report.tokens_per_s, time.time() + report.finish_in_s
        self._update(steps=steps, tokens_per_s=speed, expected_finish=finish)

    def arrive(self) -> None:
        """The inner phase is over: this worker wants to average."""
        if self._own.state != "averaging":
            self.inner_s = time.time() - self._phase_started
            self._update(state="averaging", expected_finish=time.time())
            self._heart.start(self._announce())

    def follow(self) -> None:
        """This worker brings nothing to its round: others shall not count it, nor wait for it unless it is late."""
        if self._own.state != self._follower:
            self._update(state=self._follower)
            self._heart.start(self._announce())

    def be_late(self, for_s: float) -> None:
        """It fetches a round once more, which takes so long: others may wait for it until it has had a vote."""
        self._is_late = True
        self._update(state="late", expected_finish=time.time() + for_s)
        self._heart.start(self._announce())

    def took_part(self, exchange_s: float, *, with_vote: bool) -> None:
        """It was in an all-reduce of this length that came to a commit."""
        self._is_late, self.exchange_s = self._is_late and not with_vote, exchange_s

    @property
    def _follower(self) -> str:
        return "late" if self._is_late else "following"

    def move_to(self, position: Position, *, following: bool = False, steps: int = 0) -> None:
        """This worker stands at `position` now; an empty hash follows later.

        Args:
            following: it came in the middle of the inner phase, and others shall not wait for it in this round.
            steps: where in the phase it is.
        """
        self._phase_started = time.time()
        self.watch.begin(steps)
        phase_s = self.inner_s or self._config.expiry_s
        self._ledger, self._has_stopped = position.ledger, False
        self._update(
            round=position.round,
            lineage=position.lineage,
            committed_tokens=position.tokens,
            state=self._follower if following else "training",
            steps=steps,
            expected_finish=self._own.expected_finish if following and self._is_late else time.time() + phase_s,
        )
        if position.params_hash:
            self.set_params_hash(position.round, position.params_hash)
        self._heart.start(self._announce())

    def set_params_hash(self, round: int, params_hash: str) -> None:
        """The hash of the state after `round`."""
        self._update(params_hash=params_hash, hashed_round=round)
        self._heart.start(self._announce())

    def claim(self, shards: Sequence[int]) -> None:
        """These shards of the text are leased to this worker."""
        if list(shards) != self._own.shards:
            self._update(shards=list(shards))
            self._heart.start(self._announce())

    def tell(self, part: EvaluationPart) -> None:
        """What this worker's part of an evaluation came to."""
        self._update(evaluated=told_after(self._own.evaluated, part))
        self._heart.start(self._announce())

    async def leave(self) -> None:
        """Tell the others that this worker goes."""
        self._update(state="left")
        await self._announce()

    def _update(self, **changes: Any) -> None:
        self._own = self._own.model_copy(update=changes)

    async def _announce(self) -> None:
        if self._own.state == "training" and self.watch.has_stopped:
            self._has_stopped = True
            logger.warning("the trainer of this worker has done no step for long: the others go on without it")
            self._update(state="following")
        if self.watch.is_stuck:  # the record expires: what its trainer does not do nobody shall wait for
            if not self._has_stopped:
                logger.warning("the trainer of this worker does not go on after a round: the others go on without it")
            self._has_stopped = True
            return
        self._update(issued=time.time())
        try:
            async with asyncio.timeout(self._membership.lifetime_s):  # then it has expired
                await self._membership.announce(self._own)
        except TRANSPORT_ERRORS as error:
            logger.warning("the DHT did not take this peer's record: %r", error)

    async def _look_around(self) -> None:
        await self.refresh()
        self._agreement.compare_states(self._own)
        try:
            self.check_agreement()
        except SettingsError as error:
            self._refusal = error

    async def _keep_contract(self) -> None:
        try:
            await self._membership.publish_contract(self.contract)
        except TRANSPORT_ERRORS as error:
            logger.warning("the DHT did not take the run contract: %r", error)

    async def _look_for_lost_peers(self) -> None:
        await self._reconnect(list(self._membership.known))

    # --- what it sees ------------------------------------------------------------------------------------

    async def refresh(self, *, at_once: bool = False) -> None:
        """Look at the DHT, unless that was done just now; a DHT that fails leaves the last view."""
        now = time.monotonic()
        if now - self._refreshed < REFRESH_S * self._membership.stretch and not at_once:
            return
        self._refreshed = now
        try:
            await self._membership.refresh()
        except TRANSPORT_ERRORS as error:
            logger.warning("the DHT did not answer: %r", error)

    def outlook(self) -> Outlook:
        """Live peers that bring values to this worker's round: at its round and lineage, or about to get there."""
        own, run, offset = self._own, self.contract.run.id, time.monotonic() - time.time()
        key = group_key(run=run, contract=own.contract, layout=own.layout, lineage=own.lineage, round=own.round)
        candidates, late = in_sight({**self._alike(), self._peer: own}, own, self.participants, offset)
        return Outlook(key, candidates, self.inner_s, self.ahead() is not None, late, self.exchange_s)

    @property
    def peer(self) -> str:
        """This worker's peer id."""
        return self._peer

    @property
    def session(self) -> str:
        """See `Progress.session`."""
        return self._own.session

    @property
    def position(self) -> Position:
        """Where this worker stands."""
        own = self._own
        return Position(own.round, own.lineage, "", own.committed_tokens, self._ledger)

    def claims(self) -> dict[str, list[int]]:
        """Shards that are leased to each of the other live workers."""
        return {peer: record.shards for peer, record in self._alike().items()}

    def goal(self, position: Position) -> Goal | None:
        """The heaviest lineage in sight that is not doubted, if it is heavier than that of `position`."""
        return heaviest(self._doubts.without(self._alike()), position)

    def doubt(self, place: Position, reason: str) -> bool:
        """See `Doubts.about`."""
        return self._doubts.about(self._alike(), place, reason)

    def behind(self) -> list[str]:
        """Live peers that got this worker's last round and have not announced it yet."""
        view, own = self._membership.view, self._own
        return [peer for peer in sorted(self.participants) if peer in view and view[peer].round < own.round]

    def ahead(self) -> str | None:
        """Why this worker cannot take part in the swarm's current round, if so."""
        goal = self.goal(self.position)
        if goal is None:
            return None
        there, here = (f"{at.round} ({at.lineage[:6]})" for at in (goal.position, self.position))
        return f"the swarm is at round {there}, this worker at {here}"

    def lost_round(self) -> int:
        """The round that the run had reached when this worker, which would begin it anew, saw it first; else 0."""
        seen = () if self._own.round else (*self._membership.left.values(), *self._membership.reached)
        return max((one.round for one in seen if is_alike(one, self._own) and one.committed_tokens > 0), default=0)

    def announced_hash(self, position: Position) -> str | None:
        """The hash that most others announce for the state at `position`."""
        place = self._own.model_copy(update={"lineage": position.lineage, "round": position.round})
        return usual_hash(state_hashes(self._membership.view, place).values())

    def phase(self) -> tuple[int, float]:
        """Where in the inner phase of this worker's round the others are; see `phase_of_others`."""
        return phase_of_others(self._membership.view, self._own, self.contract, now=time.time())

    def _alike(self) -> dict[str, Progress]:
        return {peer: record for peer, record in self._membership.view.items() if is_alike(record, self._own)}

    def awaited(self) -> str:
        """Whom this worker's round waits for, in words."""
        candidates, view = self.outlook().candidates, self._membership.view
        if not self.has_started:
            wanted = self.contract.rounds.start_peers
            if line := start_line(self.ahead(), self.lost_round(), len(candidates), wanted):
                return line
        return missing_line(candidates, view, self._own.lineage, now=time.time())

    @property
    def fatal(self) -> OpendilocoError | None:
        """Why this worker must not go on, found in the background."""
        return self._refusal or self._heart.failure

    def is_heard_of(self, peer: str) -> bool:
        """Whether another worker still renews its record."""
        record = self._membership.view.get(peer)
        return record is not None and time.time() - record.issued < RENEWED_BEATS * self.beat_s()

    def check_agreement(self) -> None:
        """Raise where this worker cannot go on beside the others; see `agreement`."""
        if self._heart.failure is not None:
            raise self._heart.failure
        self._agreement.check(self._own, has_committed=bool(self.participants))
