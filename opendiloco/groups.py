"""The all-reduces this peer takes part in: finds the right one for every stream that comes in."""

from __future__ import annotations

import asyncio
import logging

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from torch import Tensor

from opendiloco.allreduce import AllReduce, Attempt, Group
from opendiloco.codec import Codec
from opendiloco.connect import open_stream
from opendiloco.rounds import time_limit_s
from opendiloco.wire import FrameKind, Stream, WireError

STREAM_NAME = "opendiloco.reduce"
GROUP_ID_BYTES = 16
MAX_EARLY_STREAMS = 4096
DECAY = 0.8  # of the bandwidth a link has shown, per round in which it shows less

logger = logging.getLogger(__name__)


class Groups:
    """Runs this peer's all-reduces over libp2p streams, and measures its bandwidth by the way."""

    def __init__(self, p2p: P2P, codec: Codec, *, silence_s: float) -> None:
        """Args: `silence_s` after which a member of a group counts as dropped."""
        self._p2p, self._peer, self._codec, self._silence_s = p2p, str(p2p.peer_id), codec, silence_s
        self._known: dict[bytes, asyncio.Future[AllReduce]] = {}
        self.bandwidth: float | None = None
        """Bytes per second this peer can send, once measured."""

    async def open(self) -> None:
        """Begin to answer other members' streams."""
        await self._p2p.add_binary_stream_handler(STREAM_NAME, self._serve)

    async def reduce(self, group: Group, *, values: Tensor, average: Tensor) -> Attempt:
        """This peer's part of one all-reduce: encoded `values` in, fp32 [N] `average` out after a commit."""
        reduction = AllReduce(
            group,
            self._peer,
            values=values,
            average=average,
            codec=self._codec,
            connect=self._connect,
            silence_s=self._silence_s,
            limit_s=time_limit_s(values.numel() * len(group.members)),
        )
        self._entry(group.id).set_result(reduction)
        try:
            attempt = await reduction.run()
        finally:
            # members that are still being served find it for a while longer
            asyncio.get_running_loop().call_later(self._silence_s, self._known.pop, group.id, None)
        if attempt.bandwidth is not None:  # a link that others kept busy looks slow: remember what it can do
            self.bandwidth = max(attempt.bandwidth, DECAY * (self.bandwidth or 0.0))
        return attempt

    async def _connect(self, peer: str) -> Stream:
        return await open_stream(self._p2p, peer, STREAM_NAME, silence_s=self._silence_s)

    async def _serve(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Another member's stream: it names its group first, which this peer may be about to hear of itself."""
        peer = str(info.peer_id)
        stream = Stream(reader, writer, timeout_s=self._silence_s)
        try:
            _, group_id = await stream.receive({FrameKind.GROUP: GROUP_ID_BYTES})
            reduction = await self._find(bytes(group_id))
            if reduction is None or peer not in reduction.group.peers:
                await stream.refuse("not a member of this group")
                return
            await reduction.serve(peer, stream)
        except WireError as error:
            logger.info("stream of %s ended: %s", peer, error)
        finally:
            stream.close()

    async def _find(self, group_id: bytes) -> AllReduce | None:
        if group_id not in self._known and len(self._known) >= MAX_EARLY_STREAMS:
            return None
        try:
            async with asyncio.timeout(self._silence_s):
                return await asyncio.shield(self._entry(group_id))
        except TimeoutError:
            if not self._entry(group_id).done():
                self._known.pop(group_id, None)
            return None

    def _entry(self, group_id: bytes) -> asyncio.Future[AllReduce]:
        return self._known.setdefault(group_id, asyncio.get_running_loop().create_future())
