"""Who is there: signed, expiring records on the DHT - every peer's progress, and the contracts of the runs.

Every record on the DHT belongs to the peer whose id ends its subkey and is signed by that peer's identity key;
peers refuse to store or to return anything else (`SignedRecords`). What a record says is still only a claim of its
owner: it is checked for type and size here, and nothing is allocated from it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
from hivemind.dht import DHTNode
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from pydantic import BaseModel, ValidationError

from opendiloco.claims import MAX_LIFETIME_S, Progress, Seen, Told
from opendiloco.config import Contract, contract_from_wire, contract_to_wire
from opendiloco.errors import SettingsError
from opendiloco.identity import Identity, peer_id_of, verify
from opendiloco.rounds import stretch

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES = 64 * 1024
CONTRACT_LIFETIME_S = 60.0
TOLD_LIFETIME_S = 180.0
CONTRACT_COPIES = 3
READ_LIMIT_S = 10.0
REMEMBERED_S = 3600.0
RUNS_KEY = "opendiloco.runs"
MAX_RUNS = 64
"""So many are looked at where none is named: anybody can publish contracts, and each costs a look-up."""

Record = TypeVar("Record", bound=BaseModel)


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Signs this peer's records and refuses records that are not signed by their owner, too big or too long-lived."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign_value(self, record: DHTRecord) -> bytes:
        """Envelope of value, public key and signature."""
        signature = self._identity.sign(_signed_bytes(record))
        return _pack([record.value, self._identity.public_key, signature])

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is by the peer its subkey ends with, and of a decent size and lifetime."""
        if len(record.value) > MAX_RECORD_BYTES or not record.expiration_time <= time.time() + MAX_LIFETIME_S:
            return False
        try:
            owner = msgpack.unpackb(record.subkey).rsplit("/", 1)[-1]
            value, public_key, signature = _open_envelope(record.value)
            claimed = DHTRecord(record.key, record.subkey, value, record.expiration_time)
            if peer_id_of(public_key) != owner or not verify(public_key, _signed_bytes(claimed), signature):
                return False
            MSGPackSerializer.loads(value)  # one that cannot be read would spoil everybody's look-up
        except Exception:  # whatever a stranger's bytes make the parsers raise
            return False
        return True

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value inside the envelope."""
        return _open_envelope(record.value)[0]


def _open_envelope(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Value, public key and signature; raises ValueError for anything else."""
    envelope = msgpack.unpackb(data)
    if not (isinstance(envelope, list) and len(envelope) == 3 and all(isinstance(part, bytes) for part in envelope)):
        raise ValueError("not an envelope")
    value, public_key, signature = envelope
    return value, public_key, signature


def _signed_bytes(record: DHTRecord) -> bytes:
    fields = [b"opendiloco record", record.key, record.subkey, record.value, record.expiration_time]
    return _pack(fields)


def _pack(fields: list[object]) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


@dataclass
class Membership:
    """This peer's view of its run, and its own records in it."""

    node: DHTNode
    identity: Identity
    expiry_s: float
    run_id: str = ""
    view: dict[str, Progress] = field(default_factory=dict)
    """Live workers of the run by peer id, this one excluded; as of the last `refresh`."""
    left: dict[str, Progress] = field(default_factory=dict)
    """Workers that have just left, and what they said last."""
    own: Progress | None = None
    """This peer's own newest record as the DHT shows it."""
    reached: list[Progress] = field(default_factory=list)
    """The newest records of all runs, as of the last `find_runs`."""
    known: dict[str, float] = field(default_factory=dict)
    """Every worker of the run that was seen in the last hour, and when."""
    _expirations: dict[str, float] = field(default_factory=dict)

    @property
    def stretch(self) -> float:
        """See `rounds.stretch`; all workers in sight count, and this one."""
        return stretch(1 + len(self.view))

    @property
    def lifetime_s(self) -> float:
        """Seconds after which a worker that renews no record counts as gone."""
        return self.expiry_s * self.stretch

    async def announce(self, progress: Progress) -> bool:
        """Store this peer's progress for the next `lifetime_s` seconds; False when nobody took it."""
        return await self._store(f"{self.run_id}.progress", self.identity.peer_id, progress.model_dump())

    async def tell(self, told: Told) -> bool:
        """Store what this worker tells those who only look; False when nobody took it."""
        return await self._store(
            f"{self.run_id}.told", self.identity.peer_id, told.model_dump(), lifetime_s=TOLD_LIFETIME_S
        )

    async def observe(self, run_id: str) -> dict[str, Seen]:
        """All that is on the DHT of the workers of a run, by peer id; this peer need not be in it."""
        progress, told = await asyncio.gather(
            self._read_progress(run_id), self._read(f"{run_id}.told", limit_s=READ_LIMIT_S)
        )
        heard = {peer: _parse(Told, value) for peer, (value, _) in told.items() if "/" not in peer}
        return {peer: Seen(*progress.get(peer, (None, 0.0)), heard.get(peer)) for peer in sorted({*progress, *heard})}

    async def refresh(self) -> None:
        """Read the records of all workers of the run.

        A worker leaves the view when it says so or when its newest record expires, never because one look at the
        DHT did not show it: who believes that the others are gone goes on alone.
        """
        for peer, (record, expiration) in (await self._read_progress(self.run_id)).items():
            if peer == self.identity.peer_id:
                self.own = record
            elif record is not None and (peer not in self.view or record.issued >= self.view[peer].issued):
                self.view[peer], self._expirations[peer] = record, expiration
        now = time.time()
        self.left = {peer: record for peer, record in self.view.items() if record.state == "left"}
        for peer in self.left:
            del self.view[peer]
            self.known.pop(peer, None)
        for peer in [peer for peer in self.view if self._expirations[peer] < now]:
            del self.view[peer]
        self.known |= dict.fromkeys(self.view, now)
        self.known = {peer: seen for peer, seen in self.known.items() if now - seen < REMEMBERED_S}

    async def publish_contract(self, contract: Contract) -> None:
        """Keep a few signed copies of the contract on the DHT, renewed by whoever sees too few."""
        run_id, wire, horizon = contract.run.id, contract_to_wire(contract), time.time() + CONTRACT_LIFETIME_S / 2
        copies = [
            subkey
            for subkey, (value, until) in (await self._read(RUNS_KEY, limit_s=READ_LIMIT_S)).items()
            if subkey.rpartition("/")[0] == run_id and value == wire and until > horizon
        ]
        if len(copies) < CONTRACT_COPIES:
            await self._store(RUNS_KEY, f"{run_id}/{self.identity.peer_id}", wire, lifetime_s=CONTRACT_LIFETIME_S)

    async def find_runs(self, run_id: str | None = None, *, with_workers: bool = False) -> dict[str, list[Contract]]:
        """Contracts on this DHT by run id; several under an id where it cannot be told which one its workers follow.

        Args:
            run_id: the only run to look for; without it, the `MAX_RUNS` that most peers have published.
            with_workers: only of runs that somebody is in; a contract outlives the last worker.
        """
        wires = defaultdict[str, list[Any]](list)
        for subkey, (value, _) in (await self._read(RUNS_KEY, limit_s=READ_LIMIT_S)).items():
            named = subkey.rpartition("/")[0]
            if run_id in (None, named):
                wires[named].append(value)
        found: dict[str, dict[str, Contract]] = {}
        for named in heapq.nlargest(MAX_RUNS, wires, key=lambda named: len(wires[named])):
            for wire in wires[named]:
                try:
                    contract = contract_from_wire(wire)
                except (SettingsError, TypeError):
                    continue  # a broken record harms only its owner
                if contract.run.id == named:
                    found.setdefault(named, {})[contract.digest] = contract
        progress = await asyncio.gather(*map(self._read_progress, found))
        records = [[record for record, _ in of_run.values() if record is not None] for of_run in progress]
        self.reached = [record for of_run in records for record in of_run]
        return {
            named: _followed(named, found[named], of_run)
            for named, of_run in zip(found, records, strict=True)
            if not with_workers or any(record.state != "left" for record in of_run)
        }

    async def _store(self, key: str, subkey: str, value: Any, lifetime_s: float | None = None) -> bool:
        expiration = time.time() + (lifetime_s or self.lifetime_s)
        return bool(await self.node.store(key, value, expiration_time=expiration, subkey=subkey))

    async def _read_progress(self, run_id: str) -> dict[str, tuple[Progress | None, float]]:
        """What the workers of a run say, None where it makes no sense, and until when it counts; by peer id."""
        limit_s = min(READ_LIMIT_S, self.expiry_s / 3)  # so that two looks see a record before it expires
        found = await self._read(f"{run_id}.progress", limit_s=limit_s)
        # of one owner's subkeys the one that is no more than its id: all that validation looks at is how they end
        return {peer: (_parse(Progress, value), until) for peer, (value, until) in found.items() if "/" not in peer}

    async def _read(self, key: str, *, limit_s: float) -> dict[str, tuple[Any, float]]:
        """Values under a key and when they expire, by subkey; none where the DHT does not answer in time."""
        try:
            async with asyncio.timeout(limit_s):
                found = await self.node.get(key, latest=True)
        except TimeoutError:
            logger.warning("the DHT did not answer within %g s (%s)", limit_s, key)
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        now = time.time()
        return {
            subkey: (item.value, item.expiration_time)
            for subkey, item in found.value.items()
            if isinstance(subkey, str) and item.expiration_time > now
        }


def _parse(kind: type[Record], value: object) -> Record | None:
    try:
        return kind.model_validate(value)
    except ValidationError:
        return None


def _followed(run_id: str, contracts: dict[str, Contract], records: Sequence[Progress]) -> list[Contract]:
    """Of several contracts of a run the one that most of the workers follow that stand on committed rounds."""
    if len(contracts) == 1:
        return list(contracts.values())
    counts = Counter(record.contract for record in records if record.committed_tokens > 0)
    (digest, count), *_ = [*counts.most_common(1), ("", 0)]
    if digest not in contracts or 2 * count <= counts.total():
        return list(contracts.values())
    logger.warning(
        "run %s has %d contracts on the DHT: %d of %d workers with committed rounds follow %s",
        run_id,
        len(contracts),
        count,
        counts.total(),
        digest[:12],
    )
    return [contracts[digest]]
