"""The network process of one peer: libp2p, the DHT, this peer's records, its part in rounds and recoveries.

It is a process of its own so that neither a long compilation nor the interpreter lock of the trainer ever makes
the peer look dead. The trainer's handle on it is `swarm.Swarm`; everything below runs in one event loop, which
uses hivemind's `DHTNode` and `P2P` directly instead of its forked `DHT` process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
import uvloop

from opendiloco.averager import contribution_bytes
from opendiloco.channel import answer_calls
from opendiloco.claims import News, Told
from opendiloco.codec import get_codec
from opendiloco.config import Contract, SwarmConfig
from opendiloco.connect import open_stream
from opendiloco.donor import STREAM_NAME as FETCH_STREAM
from opendiloco.donor import Donor
from opendiloco.errors import SwarmError
from opendiloco.evaluation import EvaluationPart
from opendiloco.groups import Groups
from opendiloco.guard import leave_with_parent, runtime_dir
from opendiloco.identity import Identity
from opendiloco.leases import Leases
from opendiloco.ledger import Reading
from opendiloco.lobby import Rules
from opendiloco.logs import file_formatter, setup_logging
from opendiloco.onlooker import Onlooker
from opendiloco.participation import Participation
from opendiloco.phase import PhaseReport
from opendiloco.presence import REFRESH_S, Presence
from opendiloco.recovery import Recoverer
from opendiloco.rendezvous import Rendezvous
from opendiloco.rounds import Goal, Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.shared import map_vectors
from opendiloco.tally import gather_parts
from opendiloco.teller import Teller
from opendiloco.wire import Stream

logger = logging.getLogger(__name__)

LAST_ROUND_LIMIT_S = 120.0  # for others to get what this peer has, before it ends


class PeerProcess(Onlooker):
    """One peer as its network process knows it. Its public methods are what the trainer calls."""

    def __init__(
        self, config: SwarmConfig, identity: Identity, runtime_dir: Path, folder: Path | None, memory: int
    ) -> None:
        super().__init__(config, identity, runtime_dir)
        self._folder, self._memory, self._entered = folder, memory, False
        self._behind_s = 0.0
        """What catching up took, since this worker has last had a vote in a round."""

    async def close(self) -> None:
        """Stop everything this process runs."""
        if self._entered:
            await self._teller.close()
            await self._presence.close()
            await self._donor.close()
        await super().close()

    # --- as a worker -------------------------------------------------------------------------------------

    async def enter(self, contract: Contract, layout: str, sizes: dict[str, int], position: Position) -> None:
        """Become a worker of a run, whose outer state in shared memory stands at `position`."""
        p2p, silence_s, codec = self._host.p2p, contract.rounds.failure_timeout_s, get_codec(contract.outer.codec)
        vectors = map_vectors(self._memory, sizes)
        self._presence = presence = Presence(
            self._membership, self._config, contract, layout, position, reconnect=self._host.reconnect
        )
        assert self._folder is not None, "a worker keeps its round log in a folder"
        self._donor = Donor(p2p, vectors, self._folder / "roundlog", keep=self._config.log_rounds, silence_s=silence_s)
        self._donor.settle(position)
        self._recoverer = Recoverer(
            vectors,
            codec,
            contract.outer,
            peer=presence.peer,
            connect=self._connect_donor,
            find_goal=self._find_goal,
            doubt=presence.doubt,
            announced_hash=presence.announced_hash,
            remember=self._donor.remember,
            history=self._donor.history,
            folder=self._folder,
            patience_s=lambda: 2 * self._membership.lifetime_s,
        )
        groups = Groups(p2p, codec, silence_s=silence_s)
        rendezvous = Rendezvous(
            p2p,
            Rules(contract.rounds.quorum, contract.rounds.grace),
            outlook=presence.outlook,
            refresh=presence.refresh,
            is_alive=self._host.is_alive,
            silence_s=silence_s,
        )
        self._participation = Participation(
            presence,
            rendezvous,
            groups,
            self._donor,
            self._recoverer,
            values=contribution_bytes(vectors, codec),
            average=vectors["average"],
            reduces=not self._config.client_mode,
        )
        self._leases = Leases(self._identity.peer_id)
        self._teller = Teller(
            self._membership,
            Told(session=presence.session, version=metadata.version("opendiloco-p2p")),
            every_s=presence.beat_s,
            bandwidth=lambda: groups.bandwidth,
        )
        self._entered = True
        for part in (groups, rendezvous, self._donor, presence, self._teller):
            await part.open()

    async def catch_up(self) -> Recovery:
        """Bring the outer state in shared memory to the head of the swarm's lineage, if that is not here.

        Raises:
            SwarmError: no donor could provide a state that checks out.
        """
        before = self._presence.position
        self._donor.hold()
        if self._behind_s:  # again: it will not be there in time, nor the next time
            self._presence.be_late(self._behind_s)
        recovery = await self._recoverer.catch_up(before, self._participation.committed_by)
        self._donor.settle(recovery.position)
        self._leases.settle(recovery.position.ledger)
        if recovery.position.lineage != before.lineage:
            self._presence.move_to(recovery.position, following=True)  # nobody waits before its trainer is ready
            self._behind_s = recovery.seconds
        inner_step, phase_s = self._presence.phase()
        return replace(recovery, inner_step=inner_step, phase_s=phase_s)

    async def begin_phase(self, following: bool, steps: int) -> None:
        """The trainer begins to train, or begins again; see `Presence.move_to`."""
        self._presence.move_to(self._presence.position, following=following, steps=steps)

    async def wait_for_start(self) -> int:
        """Wait until the contract's `start_peers` workers are there; returns how many workers are.

        0: a swarm that is further than this worker has come into sight, and must be caught up with first.

        Raises:
            SettingsError: a worker of this run has another contract, model or initial parameters.
            SwarmError: this worker would begin a run anew which others have just left.
        """
        presence, give_up = self._presence, time.monotonic() + self._config.startup_timeout_s
        while True:
            await presence.refresh()
            presence.check_agreement()
            if presence.ahead() is not None:
                return 0
            reached = presence.lost_round()
            if reached and time.monotonic() > give_up:
                raise SwarmError(
                    f"run {presence.contract.run.id} had reached round {reached}, and none of its workers is there any "
                    f"more: --resume latest goes on from a checkpoint of theirs; to begin anew choose another run.id, "
                    f"or wait {self._membership.lifetime_s:.0f} s"
                )
            present = len(presence.outlook().candidates.keys() | {presence.peer})
            if not reached and (present >= presence.contract.rounds.start_peers or presence.position.round > 0):
                presence.has_started = True
                presence.move_to(presence.position)
                return present
            await asyncio.sleep(REFRESH_S)

    async def report(self, report: PhaseReport) -> None:
        """The trainer's progress in its inner phase."""
        self._presence.report(report)

    async def lease(self, at: Reading | None, source: int, shards: int) -> Reading:
        """Where the trainer reads on; see `Leases.lease`."""
        presence = self._presence
        ledger, claims = presence.position.ledger, presence.claims()
        reading = self._leases.lease(at, ledger, claims, shards=shards, source=source)
        presence.claim(self._leases.claims)
        return reading

    async def average(self, request: RoundRequest) -> RoundOutcome:
        """One attempt at the round; see `Participation.average`."""
        outcome = await self._participation.average(request)
        if outcome.verdict == "commit":
            if request.weight:  # one that follows gets the averages after the others, and may be behind again
                self._behind_s = 0.0
            self._presence.took_part(outcome.allreduce_s, with_vote=request.weight > 0)
        return outcome

    async def withdraw(self) -> None:
        """Give a running `average` up, unless its all-reduce has begun."""
        self._participation.withdraw()

    async def awaited(self) -> str:
        """Whom this peer's round waits for, in words."""
        return self._recoverer.progress or self._presence.awaited()

    async def committed(self, position: Position) -> None:
        """The trainer has applied a round: from here on this peer stands there. The hash follows later."""
        self._presence.move_to(position)
        self._donor.settle(position)
        self._leases.settle(position.ledger)

    async def set_params_hash(self, round: int, params_hash: str) -> None:
        """The hash of the state after `round`, which is computed after the round was announced."""
        self._presence.set_params_hash(round, params_hash)

    async def share_evaluation(self, part: EvaluationPart, peers: tuple[str, ...]) -> dict[str, EvaluationPart]:
        """Tell what this worker's part of an evaluation came to; gives the parts of `peers` that have come in time."""
        presence, membership = self._presence, self._membership
        presence.tell(part)
        others = [peer for peer in peers if peer != presence.peer]
        found = await gather_parts(
            part.lineage,
            others,
            records=lambda: membership.left | membership.view,
            patience_s=2 * presence.beat_s(),
        )
        return {presence.peer: part, **found}

    async def tell(self, news: News) -> None:
        """Something for those who only look; on the DHT soon."""
        self._teller.tell(news)

    async def wait_for_others(self) -> None:
        """Stay until whoever took part in the last round has it: it may still need bytes from here."""
        if self._entered:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_ROUND_LIMIT_S):
                    while self._presence.behind():
                        await asyncio.sleep(REFRESH_S)
                        await self._presence.refresh()

    async def leave(self) -> None:
        """Tell the swarm that this peer goes."""
        if self._entered:
            await self._presence.leave()

    async def _find_goal(self, position: Position) -> Goal | None:
        await self._presence.refresh()
        return self._presence.goal(position)

    async def _connect_donor(self, peer: str) -> Stream:
        silence_s = self._presence.contract.rounds.failure_timeout_s
        return await open_stream(self._host.p2p, peer, FETCH_STREAM, silence_s=silence_s)


async def _run(connection: Connection, memory: int) -> NoReturn:
    """Answer the trainer's calls until it hangs up, a signal comes, or the daemon ends; then end this process."""
    config, key_file, folder = connection.recv()  # from the process that started this one
    peer = PeerProcess(config, Identity.load_or_create(key_file), runtime_dir(), folder, memory)
    loop, parent = asyncio.get_running_loop(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, peer.failed.set)
    leave_with_parent()  # the guard: nobody else would clean up
    endings = {loop.create_task(answer_calls(connection, peer)), loop.create_task(peer.failed.wait())}
    try:
        ended, _ = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        for ending in ended:
            ending.result()
    finally:
        for ending in endings:
            ending.cancel()
        await peer.close()
        if os.getppid() != parent:
            logger.error("the guard of this process has been killed: this peer ends")
            shutil.rmtree(runtime_dir(), ignore_errors=True)
    sys.stderr.flush()
    os._exit(0)  # taking loop and interpreter apart costs seconds, complains of every stream, and somebody waits


def main() -> None:
    """Entry point: descriptors of the control channel and of the shared memory are the arguments."""
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    with setup_logging(None, console=False):
        handler = logging.StreamHandler(sys.stderr)  # which is log.txt
        handler.setFormatter(file_formatter())
        logging.getLogger().addHandler(handler)
        uvloop.run(_run(connection, int(sys.argv[2])))


if __name__ == "__main__":
    main()
