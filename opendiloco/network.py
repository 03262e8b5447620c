"""The network process of one peer: libp2p, the DHT, this peer's records, its part in rendezvous and all-reduce.

It is a process of its own so that neither a long compilation nor the interpreter lock of the trainer ever makes
the peer look dead. The trainer's handle on it is `swarm.Swarm`; everything below runs in one event loop, which
uses hivemind's `DHTNode` and `P2P` directly instead of its forked `DHT` process.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from opendiloco.allreduce import AllReduce, Attempt, Group
from opendiloco.channel import answer_calls
from opendiloco.codec import NonFiniteError, get_codec
from opendiloco.config import Contract, SwarmConfig
from opendiloco.connect import TRANSPORT_ERRORS, Host
from opendiloco.errors import SettingsError
from opendiloco.identity import Identity
from opendiloco.logs import setup_logging
from opendiloco.membership import Membership, Progress
from opendiloco.rendezvous import Candidate, Outlook, Rendezvous, RoundCall
from opendiloco.rounds import Position, RoundOutcome, RoundRequest, group_key
from opendiloco.shared import map_vectors
from opendiloco.wire import FrameKind, Stream, WireError

STREAM_NAME = "opendiloco.reduce"
REFRESH_S = 0.25  # shortest time between two looks at the DHT
MIN_MEASURED_BYTES = 1_000_000
MIN_LIMIT_S = 30.0  # for an attempt, whatever its size
MIN_BYTES_PER_S = 125_000  # 1 Mbit/s: a group that is slower than this gives up

logger = logging.getLogger(__name__)


class PeerProcess:
    """One peer as its network process knows it. `async def` methods are called by the trainer."""

    def __init__(self, config: SwarmConfig, identity: Identity, runtime_dir: Path, memory: int) -> None:
        self._config, self._identity, self._memory = config, identity, memory
        self._host = Host(config, identity, runtime_dir)
        self._session = secrets.token_hex(8)
        self._started = time.time()
        self._contract: Contract | None = None
        self._progress: Progress | None = None
        self._last_participants: frozenset[str] = frozenset()
        self._dropped: dict[str, set[str]] = {}  # group key -> peers that dropped out of its attempts
        self._reductions: dict[bytes, asyncio.Future[AllReduce]] = {}
        self._bandwidth: float | None = None  # bytes/s, once measured
        self._fatal: SettingsError | None = None  # found by the heartbeat, raised by the next call
        self._phase_started = time.monotonic()
        self._inner_s = 0.0  # length of the last inner phase
        self._refreshed = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    # --- called by the trainer ---------------------------------------------------------------------------

    async def open(self) -> list[str]:
        """Start libp2p and join the DHT; returns the full addresses of this peer."""
        await self._host.open()
        self._membership = Membership(self._host.node, self._identity, self._config.expiry_s)
        return await self._host.addresses()

    async def find_runs(self) -> dict[str, list[Contract]]:
        """Contracts on the DHT by run id; more than one under an id means that its peers disagree."""
        return await self._membership.find_runs()

    async def enter(self, contract: Contract, layout: str, sizes: dict[str, int], position: Position) -> None:
        """Become a worker of a run: publish its contract, announce, and answer other workers."""
        self._contract = contract
        self._vectors = map_vectors(self._memory, sizes)
        self._membership.run_id = contract.run.id
        self._progress = Progress(
            session=self._session,
            started=self._started,
            issued=time.time(),
            contract=contract.digest,
            layout=layout,
            round=position.round,
            lineage=position.lineage,
            params_hash=position.params_hash,
            hashed_round=position.round,
            state="training",
            steps=0,
            tokens_per_s=0.0,
            expected_finish=time.time() + self._config.expiry_s,
            client_mode=self._config.client_mode,
        )
        self._rendezvous = Rendezvous(
            self._host.p2p,
            outlook=self._outlook,
            refresh=self._refresh,
            is_alive=self._host.is_alive,
            quorum=contract.rounds.quorum,
            deadline=contract.rounds.deadline,
            silence_s=contract.rounds.failure_timeout_s,
        )
        await self._host.p2p.add_binary_stream_handler(STREAM_NAME, self._serve_stream)
        await self._rendezvous.open()
        await self._membership.publish_contract(contract)
        await self._announce()
        self._tasks.append(asyncio.create_task(self._heartbeat()))

    async def wait_for_start(self) -> int:
        """Wait until the contract's `start_peers` workers are there; returns how many workers are.

        Raises:
            SettingsError: a worker of this run has another contract, model or initial parameters.
        """
        assert self._contract is not None
        while True:
            await self._refresh()
            self._check_agreement()
            present = len(self._outlook().candidates)
            if present >= self._contract.rounds.start_peers or self._ahead() is not None:
                self._phase_started = time.monotonic()
                return present
            await asyncio.sleep(REFRESH_S)

    async def report(self, steps: int, tokens_per_s: float, finish_in_s: float) -> None:
        """The trainer's progress in its inner phase; told to others with the next heartbeat."""
        self._update(steps=steps, tokens_per_s=tokens_per_s, expected_finish=time.time() + finish_in_s)

    async def average(self, request: RoundRequest) -> RoundOutcome:
        """One attempt at the round: gather the group, then all-reduce the pseudo-gradient in shared memory.

        Raises:
            NonFiniteError: the pseudo-gradient holds a value that is not finite.
        """
        _require_finite(self._vectors["pseudo_gradient"])
        if self._progress is not None and self._progress.state == "training":
            self._inner_s = time.monotonic() - self._phase_started
        self._update(state="averaging", expected_finish=time.time())
        key = self._outlook().key
        if key not in self._dropped:
            self._dropped = {key: set()}
        call = RoundCall(key, request.weight, request.tokens, self._offered_bandwidth(), frozenset(self._dropped[key]))
        started = time.monotonic()
        gathering = asyncio.create_task(self._rendezvous.gather(call))
        try:
            while not gathering.done():
                await asyncio.wait({gathering}, timeout=1.0)
                if self._fatal is not None:
                    raise self._fatal
                if not gathering.done() and (ahead := self._ahead()) is not None:
                    return RoundOutcome(verdict="resync", reason=ahead, wait_s=time.monotonic() - started)
            assembly = gathering.result()
        finally:
            gathering.cancel()
        gathered = time.monotonic()
        attempt = await self._reduce(assembly.group)
        self._measure(attempt)
        self._dropped[key] |= attempt.failures.keys()
        if attempt.verdict == "commit":
            self._last_participants = frozenset(attempt.weights)
        live = len(self._outlook().candidates.keys() | set(assembly.group.peers))
        return _outcome(attempt, live, gathered - started, assembly.wait_s, time.monotonic() - gathered)

    async def committed(self, position: Position) -> None:
        """The trainer has applied a round: from here on this peer stands there. The hash follows later."""
        self._phase_started = time.monotonic()
        finish = time.time() + (self._inner_s or self._config.expiry_s)
        self._update(
            round=position.round,
            lineage=position.lineage,
            state="training",
            steps=0,
            expected_finish=finish,
        )
        await self._announce()

    async def set_params_hash(self, round: int, params_hash: str) -> None:
        """The hash of the state after `round`, which is computed after the round was announced."""
        self._update(params_hash=params_hash, hashed_round=round)

    async def awaited(self) -> str:
        """Whom this peer's round waits for, in words."""
        outlook, view = self._outlook(), self._membership.view
        others = {peer: view[peer] for peer in sorted(outlook.candidates) if peer in view}
        now = time.time()
        missing = [
            f"{peer} ({record.steps} inner steps done, expected in {max(0.0, record.expected_finish - now):.0f} s)"
            for peer, record in others.items()
            if record.state != "averaging"
        ]
        return f"{len(outlook.candidates) - len(missing)} of {len(outlook.candidates)} workers are there" + (
            f", missing: {', '.join(missing)}" if missing else ""
        )

    async def leave(self) -> None:
        """Tell the swarm that this worker goes."""
        if self._progress is not None:
            self._update(state="left")
            await self._announce()

    async def close(self) -> None:
        """Stop everything this process runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._host.close()

    # --- membership --------------------------------------------------------------------------------------

    def _update(self, **changes: Any) -> None:
        assert self._progress is not None, "not a worker yet"
        self._progress = self._progress.model_copy(update=changes)

    async def _announce(self) -> None:
        self._update(issued=time.time())
        assert self._progress is not None
        await self._membership.announce(self._progress)

    async def _refresh(self) -> None:
        """Look at the DHT, unless that was done just now; a DHT that fails leaves the last view."""
        now = time.monotonic()
        if now - self._refreshed < REFRESH_S:
            return
        self._refreshed = now
        try:
            await self._membership.refresh()
        except TRANSPORT_ERRORS as error:
            logger.warning("the DHT did not answer: %r", error)

    async def _heartbeat(self) -> None:
        assert self._contract is not None
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            try:
                await self._refresh()
                self._check_agreement()
                await self._announce()
                await self._membership.publish_contract(self._contract)
            except SettingsError as error:
                self._fatal = error
            except TRANSPORT_ERRORS as error:
                logger.warning("the DHT did not take this peer's record: %r", error)

    def _outlook(self) -> Outlook:
        """Live peers of this peer's round: at its round and lineage, or known to be about to commit it."""
        own, contract = self._progress, self._contract
        assert own is not None
        assert contract is not None
        key = group_key(
            run=contract.run.id, contract=own.contract, layout=own.layout, lineage=own.lineage, round=own.round
        )
        offset = time.monotonic() - time.time()
        candidates = {self._identity.peer_id: _candidate(own, offset)}
        for peer, record in self._membership.view.items():
            if record.contract != own.contract or record.layout != own.layout:
                continue
            same = record.round == own.round and record.lineage == own.lineage
            if same or (record.round < own.round and peer in self._last_participants):
                candidates[peer] = _candidate(record, offset)
        return Outlook(key, candidates, self._inner_s)

    def _ahead(self) -> str | None:
        """Why this peer cannot take part in the swarm's current round, if so."""
        own = self._progress
        assert own is not None
        for peer, record in self._membership.view.items():
            if record.contract == own.contract and record.round > own.round:
                return f"peer {peer} is at round {record.round}, this one at round {own.round}"
        return None

    def _check_agreement(self) -> None:
        own, contract = self._progress, self._contract
        assert own is not None
        assert contract is not None
        for peer, record in self._membership.view.items():
            if (record.started, peer) > (own.started, self._identity.peer_id):
                continue  # the later one gives way
            if record.contract != own.contract:
                raise SettingsError(
                    f"run.id {contract.run.id} is taken: peer {peer} runs it with another contract "
                    f"({record.contract[:12]}, here {own.contract[:12]}): leave out --run, or choose another run.id"
                )
            if record.layout != own.layout:
                raise SettingsError(
                    f"the model of this peer has other parameters than that of peer {peer} in run {contract.run.id}: "
                    f"install the same version of transformers"
                )
            if record.hashed_round == own.hashed_round == 0 and record.params_hash != own.params_hash:
                raise SettingsError(
                    f"initial parameters {own.params_hash[:12]} differ from {record.params_hash[:12]} of peer {peer}: "
                    f"install the same versions of torch and transformers"
                )
        seen = self._membership.own
        if seen is not None and seen.session != own.session and seen.issued > own.started > seen.started:
            raise SettingsError(
                f"swarm.identity {self._identity.path} is in use by another process of the swarm: "
                f"give each peer a folder (--out) or key file of its own"
            )

    # --- all-reduce --------------------------------------------------------------------------------------

    def _offered_bandwidth(self) -> float | None:
        return 0.0 if self._config.client_mode else self._bandwidth

    def _measure(self, attempt: Attempt) -> None:
        """Follow this peer's bandwidth; small transfers measure latency and say nothing."""
        if attempt.sent_bytes >= MIN_MEASURED_BYTES:
            before = self._bandwidth if self._bandwidth is not None else attempt.bandwidth
            self._bandwidth = (before + attempt.bandwidth) / 2

    async def _reduce(self, group: Group) -> Attempt:
        assert self._contract is not None
        codec = get_codec(self._contract.outer.codec)
        silence_s = self._contract.rounds.failure_timeout_s
        values, average = self._vectors["pseudo_gradient"], self._vectors["average"]
        size = codec.wire_bytes(values.numel()) * len(group.members)
        reduction = AllReduce(
            group,
            self._identity.peer_id,
            values=values,
            average=average,
            codec=codec,
            connect=self._connect,
            silence_s=silence_s,
            limit_s=MIN_LIMIT_S + 2 * size / MIN_BYTES_PER_S,
        )
        registered = self._reductions.setdefault(group.id, asyncio.get_running_loop().create_future())
        registered.set_result(reduction)
        try:
            return await reduction.run()
        finally:
            loop = asyncio.get_running_loop()
            loop.call_later(silence_s, self._reductions.pop, group.id, None)

    async def _connect(self, peer: str) -> Stream:
        assert self._contract is not None
        silence_s = self._contract.rounds.failure_timeout_s
        try:
            async with asyncio.timeout(silence_s):
                p2p: P2P = self._host.p2p
                _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer), STREAM_NAME)
        except TRANSPORT_ERRORS as error:
            raise WireError(f"cannot be reached ({error or type(error).__name__})") from None
        return Stream(reader, writer, timeout_s=silence_s)

    async def _serve_stream(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Another member's stream: it names its group first, which this peer may be about to hear of itself."""
        assert self._contract is not None
        silence_s = self._contract.rounds.failure_timeout_s
        stream = Stream(reader, writer, timeout_s=silence_s)
        try:
            _, group_id = await stream.receive({FrameKind.GROUP: 16})
            reduction = await self._reduction_of(bytes(group_id), silence_s)
            if reduction is None or str(info.peer_id) not in reduction.group.peers:
                await stream.refuse("not a member of this group")
                return
            await reduction.serve(str(info.peer_id), stream)
        except WireError as error:
            logger.info("stream of %s ended: %s", info.peer_id, error)
        finally:
            stream.close()

    async def _reduction_of(self, group_id: bytes, timeout_s: float) -> AllReduce | None:
        known = self._reductions.setdefault(group_id, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(known)
        except TimeoutError:
            self._reductions.pop(group_id, None)
            return None


def _candidate(record: Progress, offset: float) -> Candidate:
    return Candidate(record.expected_finish + offset, can_lead=not record.client_mode)


def _require_finite(values: torch.Tensor) -> None:
    """One pass: the extremes of a vector with a NaN are NaN."""
    if values.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(values)):
        raise NonFiniteError("the pseudo-gradient is not finite: this worker does not contribute to the round")


def _outcome(attempt: Attempt, live: int, gathering_s: float, wait_s: float, allreduce_s: float) -> RoundOutcome:
    reasons = [f"{peer}: {reason}" for peer, reason in sorted(attempt.failures.items())]
    return RoundOutcome(
        verdict=attempt.verdict,
        reason="; ".join(reasons),
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
    config, key_file, runtime_dir = connection.recv()  # from the process that started this one
    identity = Identity.load_or_create(key_file)
    peer = PeerProcess(config, identity, runtime_dir, memory)
    try:
        await answer_calls(connection, peer)
    finally:
        await peer.close()


def main() -> None:
    """Entry point: descriptors of the control channel and of the shared memory are the arguments."""
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    with setup_logging(None, console=False):
        logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))  # the trainer points this at log.txt
        uvloop.run(_run(connection, int(sys.argv[2])))


if __name__ == "__main__":
    main()
