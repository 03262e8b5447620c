"""A peer that is in no run: on the DHT, with what it can read there and ask of others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import torch
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from opendiloco.claims import Seen
from opendiloco.codec import get_codec
from opendiloco.config import Contract, SwarmConfig
from opendiloco.connect import TRANSPORT_ERRORS, Host, open_stream
from opendiloco.donor import STREAM_NAME as FETCH_STREAM
from opendiloco.fetcher import Fetcher
from opendiloco.health import end_of_use
from opendiloco.identity import Identity
from opendiloco.membership import Membership
from opendiloco.uplink import SILENCE_S, measure
from opendiloco.uplink import STREAM_NAME as UPLINK_STREAM
from opendiloco.wire import Stream, WireError

PING_LIMIT_S = 5.0
PROBE_S = 3.0
"""For which a download is measured."""
PROBE_VALUES, PROBE_STREAMS = 1 << 16, 4

logger = logging.getLogger(__name__)


class Onlooker:
    """Its public methods are what its owner calls from another process."""

    def __init__(self, config: SwarmConfig, identity: Identity, runtime_dir: Path) -> None:
        self._config, self._identity = config, identity
        self._host = Host(config, identity, runtime_dir)
        self._watching: asyncio.Task[None] | None = None
        self.failed = asyncio.Event()
        """Set when this process is of no use any more."""

    async def open(self) -> list[str]:
        """Start libp2p and join the DHT; returns the full addresses of this peer."""
        await self._host.open()
        self._watching = asyncio.create_task(self._watch())
        self._membership = Membership(self._host.node, self._identity, self._config.expiry_s)
        return await self._host.addresses()

    async def find_runs(self, run_id: str | None, with_workers: bool) -> dict[str, list[Contract]]:
        """See `Membership.find_runs`."""
        return await self._membership.find_runs(run_id, with_workers=with_workers)

    async def observe(self, run_id: str) -> dict[str, Seen]:
        """See `Membership.observe`."""
        return await self._membership.observe(run_id)

    async def clock_offset(self, peer: str) -> float | None:
        """Seconds by which a peer's clock is ahead of this machine's, to half a round trip; None: no answer."""
        try:
            request = dht_pb2.PingRequest(peer=self._host.node.protocol.node_info, validate=False)
            stub = self._host.node.protocol.get_stub(PeerID.from_base58(peer))
            async with asyncio.timeout(PING_LIMIT_S):
                asked = get_dht_time()
                answer = await stub.rpc_ping(request)
                answered = get_dht_time()
        except (*TRANSPORT_ERRORS, ValueError):
            return None
        return float(answer.dht_time) - (asked + answered) / 2 if answer.dht_time else None

    async def download(self, peer: str, contract: Contract, numel: int, vectors: int) -> float | None:
        """Bytes per second that a worker of a run gives of its state for some seconds; None: it gives nothing.

        Args:
            numel: trained parameters of the run's model.
            vectors: of that size, that the state has.
        """
        count = min(numel, PROBE_VALUES)
        room = [torch.empty(count) for _ in range(vectors)]
        silence_s = contract.rounds.failure_timeout_s

        async def connect(donor: str) -> Stream:
            return await open_stream(self._host.p2p, donor, FETCH_STREAM, silence_s=silence_s)

        fetcher = Fetcher(connect, get_codec(contract.outer.codec), room[0], room)
        began = time.monotonic()

        def take() -> slice | None:
            return slice(0, count) if time.monotonic() - began < PROBE_S else None

        async def pull() -> None:
            with contextlib.suppress(WireError):
                async with contextlib.aclosing(fetcher.chunks(peer, take)) as chunks:
                    async for _ in chunks:
                        pass

        await asyncio.gather(*(pull() for _ in range(PROBE_STREAMS)))  # one waits for the way of each question
        return fetcher.received_bytes / (time.monotonic() - began) if fetcher.used else None

    async def upload(self, peer: str) -> float | None:
        """Bytes per second that a peer receives from this one for some seconds; None: it does not say."""
        try:
            stream = await open_stream(self._host.p2p, peer, UPLINK_STREAM, silence_s=SILENCE_S)
        except WireError:
            return None
        return await measure(stream)

    async def close(self) -> None:
        """Stop everything this process runs."""
        if self._watching is not None:
            self._watching.cancel()
        await self._host.close()

    async def _watch(self) -> None:
        logger.error(await end_of_use(self._host))
        self.failed.set()
