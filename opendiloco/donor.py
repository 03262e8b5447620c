"""What a worker gives to those who recover: committed rounds from its log, and chunks of its outer state.

Chunks are read from the memory that the network process shares with its trainer, between two outer steps, and say
which round they belong to. Nothing is copied as a whole, and the trainer never notices. During an all-reduce whoever
asks for a chunk waits; rounds are given at once, because who lacks one can take no part in the next. Whether a
round was committed is answered however many streams move data: a second average of it may hang on the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from opendiloco.roundlog import LogEntry, RoundLog
from opendiloco.rounds import Position
from opendiloco.wire import FrameKind, Stream, WireError

STREAM_NAME = "opendiloco.fetch"
STATE_VECTORS = ("theta", "momentum", "second_moment")
INNER_VECTORS = ("inner_first", "inner_second")
"""Moments of this worker's inner optimizer after its last commit, where the contract wants them given to joiners.
Unlike the outer state they differ between workers: each chunk is some donor's, and no hash covers them."""
MAX_REQUEST_BYTES = 1024
MAX_CHUNK_VALUES = 1 << 20
UNDECIDED = "undecided"
NOT_LOGGED = "is not in the log"
ELSEWHERE = "is on another lineage"
KEEPALIVE_S = 1.0
MAX_STREAMS = 32  # that move data at once: joiners share what a donor can send, they do not multiply it

logger = logging.getLogger(__name__)

HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**40)]


class Ask(BaseModel):
    """One request on a fetch stream."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    what: Literal["round", "commit", "chunk", "ledger"]
    """commit: the header of a round, if there is one."""
    round: Count = 0
    """round, commit: the one that was committed on top of lineage `before`."""
    before: HexDigest | None = None
    start: Count = 0
    """chunk: values [start, stop) of every state vector."""
    stop: Count = 0


class ChunkHeader(BaseModel):
    """Which committed round a chunk of the outer state belongs to."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    round: Count
    lineage: HexDigest
    tokens: Annotated[int, Field(ge=0, le=2**60)]


class Donor:
    """Serves this worker's round log and outer state to other workers of the run."""

    def __init__(self, p2p: P2P, vectors: Mapping[str, Tensor], folder: Path, *, keep: int, silence_s: float) -> None:
        """Args: `folder` takes the last `keep` rounds, `silence_s` ends streams that do not move."""
        self._p2p, self._silence_s = p2p, silence_s
        given = (vectors.get(name) for name in (*STATE_VECTORS, *INNER_VECTORS))
        self._state = [vector for vector in given if vector is not None and vector.numel()]
        self._numel = vectors["theta"].numel()
        self._log = RoundLog(folder, keep=keep)
        self._newest: tuple[LogEntry, list[memoryview]] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._position: Position | None = None
        self._steady = asyncio.Event()
        self._busy = asyncio.Semaphore(MAX_STREAMS)
        self._undecided: int | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.trouble: str | None = None
        """Why the log on disk is behind, if it is."""

    async def open(self) -> None:
        """Begin to answer."""
        await self._p2p.add_binary_stream_handler(STREAM_NAME, self._serve)

    async def close(self) -> None:
        """Wait until the newest round is on disk."""
        if self._writing is not None:
            await self._writing

    # --- what this worker has ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_all_reduce(self, round: int) -> Iterator[None]:
        """Meanwhile this worker may still come to commit `round`, and gives no chunks: they would slow it down."""
        self._undecided = round
        self._idle.clear()
        try:
            yield
        finally:
            self._undecided = None
            self._idle.set()

    def hold(self) -> None:
        """The outer state is about to change: give none of it away until `settle`."""
        self._steady.clear()

    def settle(self, position: Position) -> None:
        """The outer state in shared memory is that of `position`."""
        self._position = position
        self._steady.set()

    def remember(self, entry: LogEntry, payload: list[memoryview]) -> None:
        """A round has been committed: it can be fetched from now on, and goes to disk in the background."""
        self._newest = entry, payload
        before = self._writing
        self._writing = asyncio.get_running_loop().create_task(self._write(entry, payload, before))

    def history(self, lineage: str) -> list[tuple[int, str]]:
        """The rounds that led to `lineage`, newest first and as far as logged, each with the one before it."""
        return list(self._log.history(lineage))

    async def _write(self, entry: LogEntry, payload: list[memoryview], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            await asyncio.to_thread(self._log.append, entry, payload)
            self.trouble = None
        except OSError as error:
            self.trouble = f"round {entry.round} cannot be logged: {error.strerror}"
            logger.warning("%s: make room; training goes on", self.trouble)

    # --- what others ask for -----------------------------------------------------------------------------

    async def _serve(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer, timeout_s=self._silence_s)
        try:
            async with contextlib.AsyncExitStack() as slot:
                await self._answer_all(stream, slot)
        except WireError as error:
            logger.debug("fetch stream of %s ended: %s", info.peer_id, error)
        finally:
            stream.close()

    async def _answer_all(self, stream: Stream, slot: contextlib.AsyncExitStack) -> None:
        """Args: `slot` holds the stream's place among those that move data, from the first request for any."""
        has_slot = False
        while True:
            try:
                ask = Ask.model_validate_json(await stream.receive_text(FrameKind.REQUEST, max_bytes=MAX_REQUEST_BYTES))
            except ValidationError:
                await stream.refuse("a malformed request")
                return
            if ask.what == "commit":
                header, _ = await self._find_round(ask, stream)
                await stream.send(FrameKind.HEADER, header)
                continue
            if not has_slot and self._busy.locked():
                await stream.refuse("busy: ask another peer")
                return
            if not has_slot:
                await slot.enter_async_context(self._busy)
                has_slot = True
            if ask.what == "round":
                header, payload = await self._find_round(ask, stream)
                await stream.send(FrameKind.HEADER, header)
                await stream.send(FrameKind.DATA, *payload)
            elif ask.what == "chunk":
                await self._send_chunk(ask, stream)
            else:
                ledger = (await self._settled(stream)).ledger
                await stream.send(FrameKind.HEADER, ledger.model_dump_json().encode())

    async def _find_round(self, ask: Ask, stream: Stream) -> tuple[bytes, list[memoryview]]:
        """Header and payload of a committed round; a refusal where there is none."""
        newest = self._newest
        if newest is not None and newest[0].round == ask.round:
            entry, payload = newest
            if entry.before == ask.before:
                return entry.pack(), payload
        if ask.round == self._undecided:
            raise await _refusal(stream, UNDECIDED)
        stored = await asyncio.to_thread(self._log.read, ask.round)
        if stored is None or f'"before":"{ask.before}"'.encode() not in stored[0]:
            there = await asyncio.to_thread(self.history, self._position.lineage) if self._position else []
            is_there = ask.round in dict(there)
            raise await _refusal(stream, f"round {ask.round} {ELSEWHERE if is_there else NOT_LOGGED}")
        return stored[0], [memoryview(stored[1])]

    async def _send_chunk(self, ask: Ask, stream: Stream) -> None:
        if not 0 < ask.stop - ask.start <= MAX_CHUNK_VALUES or ask.stop > self._numel:
            raise await _refusal(stream, "no such chunk")
        while not self._idle.is_set():
            await stream.send(FrameKind.WAITING)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(KEEPALIVE_S, self._silence_s / 4)):
                    await self._idle.wait()
        position = await self._settled(stream)
        # copied without a pause in between, so that all of it belongs to one round
        pieces = [vector[ask.start : ask.stop].numpy().tobytes() for vector in self._state]
        header = ChunkHeader(round=position.round, lineage=position.lineage, tokens=position.tokens)
        await stream.send(FrameKind.HEADER, header.model_dump_json().encode())
        await stream.send(FrameKind.DATA, *pieces)

    async def _settled(self, stream: Stream) -> Position:
        """Where the outer state stands, once it is not about to change."""
        try:
            async with asyncio.timeout(self._silence_s):
                await self._steady.wait()
        except TimeoutError:
            raise await _refusal(stream, "this peer's state is changing") from None
        assert self._position is not None
        return self._position


async def _refusal(stream: Stream, reason: str) -> WireError:
    await stream.refuse(reason)
    return WireError(reason)
