"""Asking donors: committed rounds, chunks of the outer state, how far the text was read.

The other side is `donor.Donor`. What comes is checked for size and form before anything is allocated or used.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

import torch
from pydantic import ValidationError
from torch import Tensor

from opendiloco.codec import Codec, CodecError
from opendiloco.donor import ELSEWHERE, NOT_LOGGED, Ask, ChunkHeader
from opendiloco.ledger import Ledger
from opendiloco.roundlog import MAX_HEADER_BYTES, LogEntry, LogError, decode_average
from opendiloco.rounds import RoundFate, time_limit_s
from opendiloco.wire import FrameKind, Stream, WireError

MAX_CHUNK_HEADER_BYTES = 1024

Connect = Callable[[str], Awaitable[Stream]]

logger = logging.getLogger(__name__)


class Fetcher:
    """One worker's questions to donors. Where nobody can answer, the log says why."""

    def __init__(self, connect: Connect, codec: Codec, average: Tensor, state: Sequence[Tensor]) -> None:
        """Prepare to ask.

        Args:
            average: fp32 [N], takes the outer gradient of a round that is fetched.
            state: fp32 [N] each, take their parts of the chunks that are fetched.
        """
        self._connect, self._codec, self._average, self._state = connect, codec, average, state
        self._patience_s = time_limit_s(codec.wire_bytes(average.numel()))
        self.received_bytes = 0
        self.used: set[str] = set()
        """Donors that have given something."""

    async def round(self, round: int, before: str, donors: Sequence[str]) -> tuple[LogEntry, memoryview] | None:
        """The round that was committed on top of lineage `before`, from any donor that has it, decoded too."""
        for donor in random.sample(donors, len(donors)):
            try:
                async with self._asking(donor, Ask(what="round", round=round, before=before)) as stream:
                    header = await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_HEADER_BYTES)
                    entry = LogEntry.unpack(header, numel=self._average.numel())
                    if (entry.round, entry.before) != (round, before):
                        raise LogError("another round than the one asked for")
                    _, payload = await stream.receive({FrameKind.DATA: entry.payload_bytes(self._codec)})
                    decode_average(entry, payload, self._codec, self._average)
            except (WireError, LogError, CodecError) as error:
                logger.info("donor %s: %s", donor, error)
                continue
            self.used.add(donor)
            return entry, memoryview(payload)
        return None

    async def has_round(self, peer: str, round: int, before: str) -> bool | None:
        """Whether a peer has committed that round on top of lineage `before`; None while it may still do so.

        Raises:
            WireError: it could not be asked, or gave no answer: that tells nothing.
        """
        fate = await self.fate_of(peer, round, before)
        return None if fate == "undecided" else fate == "committed"

    async def fate_of(self, peer: str, round: int, before: str) -> RoundFate:
        """What has become of that round on top of lineage `before` at a peer; raises WireError as `has_round`."""
        async with self._asking(peer, Ask(what="commit", round=round, before=before)) as stream:
            try:
                await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_HEADER_BYTES)
            except WireError as error:
                said = str(error)
                if not said.startswith("refused: "):
                    raise
                if ELSEWHERE in said:
                    return "elsewhere"
                return "unknown" if NOT_LOGGED in said else "undecided"  # which includes one that is busy
        return "committed"

    async def ledger(self, donors: Sequence[str]) -> Ledger | None:
        """How far the text has been read; a donor may be a round further, which does no harm."""
        for donor in donors:
            try:
                async with self._asking(donor, Ask(what="ledger")) as stream:
                    answer = await stream.receive_text(FrameKind.HEADER, max_bytes=MAX_HEADER_BYTES)
                    return Ledger.model_validate_json(answer)
            except (WireError, ValidationError) as error:
                logger.info("donor %s: %s", donor, error)
        return None

    async def chunks(self, donor: str, take: Callable[[], slice | None]) -> AsyncGenerator[tuple[slice, ChunkHeader]]:
        """Chunks of the state from one donor, as long as `take` gives any to fetch.

        Raises:
            WireError: the donor failed; the chunk taken last is not there.
        """
        stream, counted = await self._connect(donor), 0
        try:
            while (chunk := take()) is not None:
                ask = Ask(what="chunk", start=chunk.start, stop=chunk.stop)
                await stream.send(FrameKind.REQUEST, ask.model_dump_json().encode())
                answer = await stream.receive_text(
                    FrameKind.HEADER, max_bytes=MAX_CHUNK_HEADER_BYTES, patience_s=self._patience_s
                )
                try:
                    header = ChunkHeader.model_validate_json(answer)
                except ValidationError:
                    raise WireError("sent a malformed header") from None
                await self._receive_chunk(chunk, stream)
                self.used.add(donor)
                self.received_bytes += stream.received_bytes - counted
                counted = stream.received_bytes
                yield chunk, header
        finally:
            self.received_bytes += stream.received_bytes - counted
            stream.close()

    async def _receive_chunk(self, chunk: slice, stream: Stream) -> None:
        vectors, count = [vector for vector in self._state if vector.numel()], chunk.stop - chunk.start
        _, data = await stream.receive({FrameKind.DATA: 4 * count * len(vectors)})
        for index, vector in enumerate(vectors):
            vector[chunk].copy_(torch.frombuffer(data, dtype=torch.float32, count=count, offset=4 * count * index))

    @contextlib.asynccontextmanager
    async def _asking(self, donor: str, ask: Ask) -> AsyncIterator[Stream]:
        stream = await self._connect(donor)
        try:
            await stream.send(FrameKind.REQUEST, ask.model_dump_json().encode())
            yield stream
        finally:
            self.received_bytes += stream.received_bytes
            stream.close()
