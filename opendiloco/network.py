"""The network process of one peer: libp2p, the DHT, this peer's records, its part in rendezvous and all-reduce.

It is a process of its own so that neither a long compilation nor the interpreter lock of the trainer ever makes
the peer look dead. The trainer's handle on it is `swarm.Swarm`; everything below runs in one event loop, which
uses hivemind's `DHTNode` and `P2P` directly instead of its forked `DHT` process.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import uvloop

from opendiloco.allreduce import Attempt, Group
from opendiloco.channel import answer_calls
from opendiloco.codec import NonFiniteError, get_codec
from opendiloco.config import Contract, SwarmConfig
from opendiloco.connect import Host, open_stream
from opendiloco.donor import STREAM_NAME as FETCH_STREAM
from opendiloco.donor import UNDECIDED, Ask, Donor
from opendiloco.groups import Groups
from opendiloco.identity import Identity
from opendiloco.lobby import Rules
from opendiloco.logs import file_formatter, setup_logging
from opendiloco.membership import Membership
from opendiloco.outer import next_lineage
from opendiloco.presence import REFRESH_S, Presence
from opendiloco.recovery import Goal, Recoverer
from opendiloco.rendezvous import Assembly, Rendezvous, RoundCall
from opendiloco.roundlog import MAX_HEADER_BYTES, LogEntry
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.shared import map_vectors
from opendiloco.wire import FrameKind, Stream, WireError

DECISION_POLL_S = 0.1
CHECK_S = 1.0  # how often a wait for a group looks whether it still makes sense


class PeerProcess:
    """One peer as its network process knows it. Its public methods are what the trainer calls."""

    def __init__(self, config: SwarmConfig, identity: Identity, runtime_dir: Path, folder: Path, memory: int) -> None:
        self._config, self._memory, self._folder = config, memory, folder
        self._host = Host(config, identity, runtime_dir)
        self._identity = identity
        self._presence: Presence | None = None
        self._gathering: asyncio.Task[Assembly] | None = None
        self._dropped: dict[str, set[str]] = {}  # group key -> peers that dropped out of its attempts

    async def open(self) -> list[str]:
        """Start libp2p and join the DHT; returns the full addresses of this peer."""
        await self._host.open()
        self._membership = Membership(self._host.node, self._identity, self._config.expiry_s)
        return await self._host.addresses()

    async def find_runs(self) -> dict[str, list[Contract]]:
        """Contracts on the DHT by run id; more than one under an id means that its peers disagree."""
        return await self._membership.find_runs()

    # --- as a worker -------------------------------------------------------------------------------------

    async def enter(self, contract: Contract, layout: str, sizes: dict[str, int], position: Position) -> None:
        """Become a worker of a run: announce, and answer other workers."""
        self._vectors = map_vectors(self._memory, sizes)
        silence_s = contract.rounds.failure_timeout_s
        self._presence = presence = Presence(self._membership, self._config, contract, layout, position)
        self._groups = Groups(self._host.p2p, get_codec(contract.outer.codec), silence_s=silence_s)
        self._rendezvous = Rendezvous(
            self._host.p2p,
            Rules(contract.rounds.quorum, contract.rounds.deadline),
            outlook=presence.outlook,
            refresh=presence.refresh,
            is_alive=self._host.is_alive,
            silence_s=silence_s,
        )
        self._donor = Donor(
            self._host.p2p,
            self._vectors,
            self._folder / "roundlog",
            keep=self._config.log_rounds,
            silence_s=silence_s,
        )
        self._donor.settle(position)
        self._recoverer = Recoverer(
            self._vectors,
            get_codec(contract.outer.codec),
            contract.outer,
            connect=self._connect_donor,
            find_goal=self._find_goal,
            announced_hash=presence.announced_hash,
            remember=self._donor.remember,
        )
        await self._groups.open()
        await self._rendezvous.open()
        await self._donor.open()
        await presence.open()

    async def wait_for_start(self) -> int:
        """Wait until the contract's `start_peers` workers are there; returns how many workers are.

        Raises:
            SettingsError: a worker of this run has another contract, model or initial parameters.
        """
        presence = self._worker()
        while True:
            await presence.refresh()
            presence.check_agreement()
            present = len(presence.outlook().candidates)
            if present >= presence.contract.rounds.start_peers or presence.ahead() is not None:
                presence.begin_phase()
                return present
            await asyncio.sleep(REFRESH_S)

    async def report(self, steps: int, tokens_per_s: float, finish_in_s: float) -> None:
        """The trainer's progress in its inner phase."""
        self._worker().report(steps, tokens_per_s, finish_in_s)

    async def catch_up(self) -> Recovery:
        """Bring the outer state in shared memory to the head of the swarm's lineage, if that is not here.

        Raises:
            SwarmError: no donor could provide a state that checks out.
        """
        presence = self._worker()
        self._donor.hold()
        recovery = await self._recoverer.catch_up(presence.position)
        moved = recovery.position.lineage != presence.position.lineage
        if moved:
            presence.move_to(recovery.position, following=True)  # nobody waits for it before its trainer is ready
        self._donor.settle(recovery.position)
        return replace(recovery, inner_step=presence.inner_step() if moved else 0)

    async def average(self, request: RoundRequest) -> RoundOutcome:
        """One attempt at the round: gather the group, then all-reduce the pseudo-gradient in shared memory.

        Raises:
            NonFiniteError: the pseudo-gradient holds a value that is not finite.
            SettingsError: this worker must not go on (see `Presence.check_agreement`).
        """
        presence, values = self._worker(), self._vectors["pseudo_gradient"]
        if request.weight == 0:
            return await self._follow()
        _require_finite(values)
        presence.arrive()
        key = presence.outlook().key
        if key not in self._dropped:
            self._dropped = {key: set()}
        started = time.monotonic()
        assembly = await self._gather(key, request)
        if assembly is None:
            return RoundOutcome(verdict="skip", reason="withdrawn", wait_s=time.monotonic() - started)
        if isinstance(assembly, str):
            return RoundOutcome(verdict="resync", reason=assembly, wait_s=time.monotonic() - started)
        gathered = time.monotonic()
        self._donor.undecided = True
        try:
            attempt = await self._groups.reduce(assembly.group, values=values, average=self._vectors["average"])
        finally:
            self._donor.undecided = False
        self._dropped[key] |= attempt.failures.keys()
        live = len(presence.outlook().candidates.keys() | set(assembly.group.peers))
        outcome = _outcome(attempt, live, gathered - started, assembly.wait_s, time.monotonic() - gathered)
        if attempt.verdict == "commit":
            return replace(outcome, lineage=self._log(attempt))
        if await self._was_committed_by(assembly.group):
            return replace(outcome, verdict="resync", reason=f"others have committed it; {outcome.reason}")
        return outcome

    def _log(self, attempt: Attempt) -> str:
        """Keep a committed round for others to fetch; returns its lineage."""
        presence = self._worker()
        before = presence.position
        entry = LogEntry(
            round=before.round + 1,
            before=before.lineage,
            lineage=next_lineage(
                before.lineage, round=before.round + 1, weights=attempt.weights, average_digest=attempt.digest
            ),
            weights=attempt.weights,
            tokens=attempt.tokens,
            digest=attempt.digest,
            parts=attempt.parts,
        )
        presence.participants = frozenset(attempt.weights)
        self._donor.hold()  # until the trainer has done the outer step
        self._donor.remember(entry, attempt.payload)
        return entry.lineage

    async def _was_committed_by(self, group: Group) -> bool:
        """Whether a member of a group that failed here has committed the round; waits while one may still do so."""
        position = self._worker().position
        answers = [self._ask_until_decided(peer, position) for peer in group.peers if peer != self._identity.peer_id]
        return any(await asyncio.gather(*answers))

    async def _ask_until_decided(self, peer: str, position: Position) -> bool:
        ask = Ask(what="round", round=position.round + 1, before=position.lineage)
        while True:
            try:
                stream = await self._connect_donor(peer)
            except WireError:
                return False
            try:
                await stream.send(FrameKind.REQUEST, ask.model_dump_json().encode())
                await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_HEADER_BYTES)
            except WireError as error:
                if UNDECIDED not in str(error):
                    return False
            else:
                return True
            finally:
                stream.close()
            await asyncio.sleep(DECISION_POLL_S)

    async def _follow(self) -> RoundOutcome:
        """Wait until the others have committed the round in which this worker arrived; it has no part in it."""
        presence, started = self._worker(), time.monotonic()
        while (ahead := presence.ahead()) is None:
            if presence.fatal is not None:
                raise presence.fatal
            if len(presence.outlook().candidates) == 1:
                return RoundOutcome(verdict="skip", reason="the others have gone", wait_s=time.monotonic() - started)
            await asyncio.sleep(REFRESH_S)
            await presence.refresh()
        return RoundOutcome(verdict="resync", reason=ahead, wait_s=time.monotonic() - started)

    async def withdraw(self) -> None:
        """Give a running `average` up, unless its all-reduce has begun."""
        if self._gathering is not None:
            self._gathering.cancel()

    async def awaited(self) -> str:
        """Whom this peer's round waits for, in words."""
        return self._worker().awaited()

    async def committed(self, position: Position) -> None:
        """The trainer has applied a round: from here on this peer stands there. The hash follows later."""
        self._worker().move_to(position)
        self._donor.settle(position)

    async def begin_phase(self, following: bool) -> None:
        """The trainer begins to train from where it has recovered to; see `Presence.move_to`."""
        presence = self._worker()
        presence.move_to(presence.position, following=following)

    async def set_params_hash(self, round: int, params_hash: str) -> None:
        """The hash of the state after `round`, which is computed after the round was announced."""
        self._worker().set_params_hash(round, params_hash)

    async def leave(self) -> None:
        """Tell the swarm that this peer goes."""
        if self._presence is not None:
            await self._presence.leave()

    async def close(self) -> None:
        """Stop everything this process runs."""
        if self._presence is not None:
            await self._presence.close()
            await self._donor.close()
        await self._host.close()

    async def _gather(self, key: str, request: RoundRequest) -> Assembly | str | None:
        """The group of the round; why it is not for this peer; or None after `withdraw`."""
        presence = self._worker()
        bandwidth = 0.0 if self._config.client_mode else self._groups.bandwidth
        call = RoundCall(key, request.weight, request.tokens, bandwidth, frozenset(self._dropped[key]))
        self._gathering = gathering = asyncio.create_task(self._rendezvous.gather(call))
        try:
            while True:
                await asyncio.wait({gathering}, timeout=CHECK_S)
                if gathering.cancelled():
                    return None
                if gathering.done():
                    return gathering.result()
                if presence.fatal is not None:
                    raise presence.fatal
                if (ahead := presence.ahead()) is not None:
                    return ahead
        finally:
            gathering.cancel()

    async def _find_goal(self, position: Position) -> Goal | None:
        presence = self._worker()
        await presence.refresh()
        return presence.goal(position)

    async def _connect_donor(self, peer: str) -> Stream:
        silence_s = self._worker().contract.rounds.failure_timeout_s
        return await open_stream(self._host.p2p, peer, FETCH_STREAM, silence_s=silence_s)

    def _worker(self) -> Presence:
        assert self._presence is not None, "this peer has not entered a run"
        return self._presence


def _require_finite(values: torch.Tensor) -> None:
    """One pass: the extremes of a vector with a NaN are NaN."""
    if values.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(values)):
        raise NonFiniteError("the pseudo-gradient is not finite: this worker does not contribute to the round")


def _outcome(attempt: Attempt, live: int, gathering_s: float, wait_s: float, allreduce_s: float) -> RoundOutcome:
    return RoundOutcome(
        verdict=attempt.verdict,
        reason="; ".join(f"{peer}: {reason}" for peer, reason in sorted(attempt.failures.items())),
        live=live,
        weights=attempt.weights,
        tokens=attempt.tokens,
        digest=attempt.digest,
        failures=attempt.failures,
        wait_s=wait_s,
        rendezvous_s=max(0.0, gathering_s - wait_s),
        allreduce_s=allreduce_s,
        sent_bytes=attempt.sent_bytes,
        received_bytes=attempt.received_bytes,
    )


async def _run(connection: Connection, memory: int) -> None:
    config, key_file, folder, runtime_dir = connection.recv()  # from the process that started this one
    peer = PeerProcess(config, Identity.load_or_create(key_file), runtime_dir, folder, memory)
    try:
        await answer_calls(connection, peer)
    finally:
        await peer.close()


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
