"""The averaged bytes of the last rounds, on disk: what a peer that missed a round needs to catch up.

An entry is a header (which round, on which lineage, who took part) and the bytes of the average exactly as they
travelled. Entries prove themselves: the payload must have the digest of the header, and header and lineage before
must give the lineage after. So it does not matter which peer an entry comes from.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import blake3
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from opendiloco.codec import Codec
from opendiloco.ledger import MAX_READINGS, PeerName, Reading
from opendiloco.outer import next_lineage

MAX_HEADER_BYTES = 1 << 20
_NAME = re.compile(r"round-(\d{8,})\.bin", re.ASCII)
_PREFIX = struct.Struct("<8sI")
_MAGIC = b"odl-log1"

HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Readings = Annotated[tuple[Reading, ...], Field(max_length=MAX_READINGS)]


class LogError(Exception):
    """An entry that is not what it claims to be, or not one for this model."""


class LogEntry(BaseModel):
    """Header of one committed round."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    round: Annotated[int, Field(ge=1, le=2**40)]
    before: HexDigest
    """Lineage before the round."""
    lineage: HexDigest
    """Lineage after it."""
    weights: dict[PeerName, Annotated[float, Field(gt=0)]] = Field(min_length=1, max_length=4096)
    tokens: dict[PeerName, Annotated[int, Field(ge=0, le=2**50)]] = Field(max_length=4096)
    readings: dict[PeerName, Readings] = Field(max_length=4096)
    """How far each participant has read the text."""
    digest: HexDigest
    """BLAKE3 of the payload."""
    parts: list[Annotated[int, Field(ge=1)]] = Field(max_length=1 << 20)
    """Values in each part of the vector, in order; each part was encoded on its own."""

    def pack(self) -> bytes:
        """The header as it is stored and sent."""
        return self.model_dump_json().encode()

    @classmethod
    def unpack(cls, data: bytes, *, numel: int) -> LogEntry:
        """Read a header for a vector of `numel` values.

        Raises:
            LogError: malformed, for another size, or its lineage does not follow from what it says.
        """
        if len(data) > MAX_HEADER_BYTES:
            raise LogError(f"a header of {len(data)} bytes")
        try:
            entry = cls.model_validate_json(data)
        except ValidationError:
            raise LogError("a malformed header") from None
        if sum(entry.parts) != numel:
            raise LogError(f"a round of {sum(entry.parts)} values where {numel} are due")
        try:
            follows = next_lineage(
                entry.before,
                round=entry.round,
                weights=entry.weights,
                tokens=entry.tokens,
                readings=entry.readings,
                average_digest=entry.digest,
            )
        except ValueError as error:
            raise LogError(str(error)) from None
        if entry.lineage != follows:
            raise LogError(f"a lineage that does not follow from round {entry.round}")
        return entry

    def payload_bytes(self, codec: Codec) -> int:
        """Size of the payload."""
        return sum(codec.wire_bytes(size) for size in self.parts)


def decode_average(entry: LogEntry, payload: bytes | bytearray | memoryview, codec: Codec, out: Tensor) -> None:
    """Check a payload against its header and decode it into `out`, fp32 [N].

    Raises:
        LogError: the payload has another digest or size.
        CodecError: a part is no encoding.
    """
    if len(payload) != entry.payload_bytes(codec) or blake3.blake3(payload).hexdigest() != entry.digest:
        raise LogError(f"the bytes of round {entry.round} are not the ones its lineage was made of")
    data, value, byte = torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0, 0
    for size in entry.parts:
        wire_bytes = codec.wire_bytes(size)
        codec.decode(data[byte : byte + wire_bytes], out[value : value + size])
        value, byte = value + size, byte + wire_bytes


class RoundLog:
    """The last `keep` entries of one worker in a folder, one file each; files appear whole or not at all."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".round-*"):
            if leftover.is_file():
                leftover.unlink()

    def append(self, entry: LogEntry, payload: Sequence[bytes | memoryview]) -> None:
        """Store a round (one that is there already is replaced), and drop the oldest ones and those after it.

        Rounds after it are of a lineage that this worker has left, or of an earlier run in this folder.

        Raises:
            OSError: the disk is full or read-only; the entries before are whole.
        """
        path, header = self._path(entry.round), entry.pack()
        beside = path.with_name(f".{path.name}")
        try:
            with open(beside, "wb") as file:
                file.write(_PREFIX.pack(_MAGIC, len(header)))
                file.write(header)
                file.writelines(payload)
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        rounds = self.rounds()
        later = [round for round in rounds if round > entry.round]
        for dropped in (*rounds[: len(rounds) - len(later)][: -self._keep], *later):
            self._path(dropped).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Rounds that are there, oldest first."""
        names = (_NAME.fullmatch(path.name) for path in self._folder.glob("round-*.bin") if path.is_file())
        return sorted(int(name[1]) for name in names if name is not None)

    def read(self, round: int) -> tuple[bytes, bytes] | None:
        """Header and payload of a round as stored, or None."""
        try:
            with open(self._path(round), "rb") as file:
                magic, length = _PREFIX.unpack(file.read(_PREFIX.size))
                return (file.read(length), file.read()) if magic == _MAGIC and length <= MAX_HEADER_BYTES else None
        except (OSError, struct.error):
            return None

    def history(self, lineage: str) -> Iterator[tuple[int, str]]:
        """The rounds that led to `lineage`, newest first, each with the lineage that it was built on."""
        for round in reversed(self.rounds()):
            try:
                with open(self._path(round), "rb") as file:
                    magic, length = _PREFIX.unpack(file.read(_PREFIX.size))
                    entry = LogEntry.model_validate_json(file.read(min(length, MAX_HEADER_BYTES)))
            except (OSError, struct.error, ValidationError):
                return
            if magic != _MAGIC or entry.lineage != lineage:
                return
            yield round, entry.before
            lineage = entry.before

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}.bin"
