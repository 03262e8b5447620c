"""Input of peers nobody vouches for: garbage and lies harm those who send them, and honest rounds go on."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.proto import averaging_pb2

from opendiloco import dialback, donor, uplink
from opendiloco.groups import STREAM_NAME as REDUCE_STREAM
from opendiloco.identity import Identity
from opendiloco.membership import RUNS_KEY, SignedRecords
from opendiloco.rendezvous import NAMESPACE, Rendezvous
from opendiloco.rounds import group_key

if TYPE_CHECKING:
    from support.peers import Network, Peer

PROGRESS_KEY = "test.progress"
GOOD_OFFER = {"weight": 1.0, "tokens": 1, "readings": [], "bandwidth": None, "gone": [], "last_group": b""}
LIES = {
    "session": "0" * 16,
    "started": 1.0,
    "issued": 2.0,
    "contract": "0" * 64,
    "layout": "0" * 64,
    "round": 99,
    "lineage": "0" * 64,
    "params_hash": "0" * 64,
    "hashed_round": 0,
    "committed_tokens": 0,
    "state": "training",
    "steps": 0,
    "tokens_per_s": 0.0,
    "expected_finish": 1e10,
    "client_mode": False,
    "shards": [],
}


class Rogue:
    """A plain hivemind peer that speaks the swarm's protocols as it likes."""

    def __init__(self, network: Network, key_file: Path, workers: list[Peer], *, signs: bool = False) -> None:
        self._network = network
        self.identity = Identity.load_or_create(key_file)
        self.workers = workers
        self.p2p, self.node = network.run(self._open(key_file, signs=signs))

    async def _open(self, key_file: Path, *, signs: bool) -> tuple[P2P, DHTNode]:
        p2p = await P2P.create(
            initial_peers=self.workers[0].addresses,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            identity_path=str(key_file),
            check_if_identity_free=False,
        )
        validator = SignedRecords(self.identity) if signs else None
        return p2p, await DHTNode.create(p2p=p2p, initial_peers=self.workers[0].addresses, record_validator=validator)

    def close(self) -> None:
        async def shut_down() -> None:
            await self.node.shutdown()
            await self.p2p.shutdown()

        self._network.run(shut_down())

    def store(self, key: str, subkey: str | None, value: Any, *, lifetime_s: float = 60.0) -> bool:
        """Whether the record got through to at least one honest peer."""
        work = self.node.store(key, value, expiration_time=time.time() + lifetime_s, subkey=subkey)
        return bool(self._network.run(work))

    def join(self, worker: Peer, key: str, offer: bytes) -> list[int]:
        """Codes of a worker's answers to one request to be let into a group, up to the first that is not ACCEPTED."""
        return self._network.run(self._join(worker, key, offer))

    async def _join(self, worker: Peer, key: str, offer: bytes) -> list[int]:
        codes = []
        stub = Rendezvous.get_stub(self.p2p, PeerID.from_base58(worker.peer_id), namespace=NAMESPACE)
        with suppress(P2PHandlerError, P2PDaemonError):
            messages = await stub.rpc_join_group(averaging_pb2.JoinRequest(group_key=key, gather=offer))
            async for message in messages:
                codes.append(message.code)
                if message.code != averaging_pb2.ACCEPTED:
                    break
            await messages.aclose()
        return codes

    def stream(self, worker: Peer, data: bytes, name: str = REDUCE_STREAM) -> asyncio.StreamWriter:
        """Open a stream and write into it; it stays open."""

        async def write() -> asyncio.StreamWriter:
            _, _, writer = await self.p2p.call_binary_stream_handler(PeerID.from_base58(worker.peer_id), name)
            writer.write(data)
            with suppress(OSError):
                await writer.drain()
            return writer

        return self._network.run(write())


@pytest.fixture(scope="module")
def workers(module_network: Network) -> list[Peer]:
    """They see all that is below, one after the other."""
    return module_network.workers(3, size=10_000, failure_timeout_s=2.0, grace=600.0)


@pytest.fixture
def rogue(network: Network, workers: list[Peer], tmp_path: Path) -> Iterator[Rogue]:
    rogue = Rogue(network, tmp_path / "rogue.key", workers)
    yield rogue
    rogue.close()


@pytest.fixture
def signing_rogue(network: Network, workers: list[Peer], tmp_path: Path) -> Iterator[Rogue]:
    rogue = Rogue(network, tmp_path / "rogue.key", workers, signs=True)
    yield rogue
    rogue.close()


def current_key(workers: list[Peer], contract_digest: str) -> str:
    position = workers[0].position
    return group_key(
        run="test", contract=contract_digest, layout="0" * 64, lineage=position.lineage, round=position.round
    )


def commit_a_round(network: Network, workers: list[Peer]) -> None:
    started = time.monotonic()
    outcomes = network.round(workers)
    assert time.monotonic() - started < 20
    assert all(set(outcome.weights) == {peer.peer_id for peer in workers} for outcome in outcomes)
    assert all(outcome.live == len(workers) for outcome in outcomes)


def garbage_offers() -> Iterator[bytes]:
    yield from (b"", b"\xc1", b"\xff" * 1000, os.urandom(5000), b"\x91" * 5000, b"\xdd\xff\xff\xff\xff")
    yield from map(msgpack.packb, ([], 0, None, "offer", {}, {1: 2}, [GOOD_OFFER]))
    for name, value in [
        ("weight", float("nan")),
        ("weight", float("inf")),
        ("weight", -1.0),
        ("weight", "1"),
        ("tokens", -1),
        ("tokens", 2**63),
        ("tokens", 1.5),
        ("readings", "all of it"),
        ("readings", [{"shard": -1}]),
        ("readings", [{"shard": 2**41}]),
        ("readings", [{"shard": 1, "more": 1}]),
        ("readings", [{"shard": 1}] * 33),
        ("bandwidth", float("inf")),
        ("bandwidth", -1.0),
        ("gone", "everybody"),
        ("gone", [1, 2]),
        ("gone", ["x" * 10_000]),
        ("gone", ["x"] * 100_000),
    ]:
        yield msgpack.packb(GOOD_OFFER | {name: value})


def test_garbage_offers_are_refused(network: Network, workers: list[Peer], rogue: Rogue) -> None:
    digest = network.contract(3, failure_timeout_s=2.0, grace=600.0).digest
    for worker in workers:
        for offer in garbage_offers():
            answer = rogue.join(worker, current_key(workers, digest), offer)
            assert answer in ([averaging_pb2.PROTOCOL_VIOLATION], [])
    for _ in range(3):
        commit_a_round(network, workers)


def test_offers_for_another_group_are_refused(network: Network, workers: list[Peer], rogue: Rogue) -> None:
    digest = network.contract(3, failure_timeout_s=2.0, grace=600.0).digest
    key = current_key(workers, digest)
    for other in ("", "0" * 64, key.upper(), key + "0", "x" * 1_000_000):
        for worker in workers:
            assert rogue.join(worker, other, msgpack.packb(GOOD_OFFER)) == [averaging_pb2.BAD_GROUP_KEY]
    commit_a_round(network, workers)


@pytest.mark.parametrize(
    "name", [REDUCE_STREAM, donor.STREAM_NAME, dialback.STREAM_NAME, uplink.STREAM_NAME], ids=lambda name: name[11:]
)
def test_streams_that_speak_no_protocol_do_not_disturb_a_round(
    network: Network, workers: list[Peer], rogue: Rogue, name: str
) -> None:
    header = struct.Struct("<BI")
    openings = [
        b"",
        b"\x00",
        os.urandom(64),
        header.pack(1, 16),
        header.pack(1, 16) + bytes(16),
        header.pack(1, 16) + os.urandom(16) + header.pack(2, 1000) + os.urandom(1000),
        header.pack(1, 2**32 - 1) + bytes(100_000),
        header.pack(2, 2**32 - 1) + bytes(100_000),
        header.pack(5, 2**32 - 1),
        header.pack(7, 2**32 - 1),
        header.pack(7, 100) + bytes(100),
        header.pack(9, 1 << 16) + bytes(1000),
        header.pack(99, 0),
    ]
    writers = []
    for _ in range(3):
        writers += [rogue.stream(worker, opening, name) for worker in workers for opening in openings]
        commit_a_round(network, workers)

    async def close() -> None:
        for writer in writers:
            writer.close()

    network.run(close())


def test_member_that_sends_garbage_costs_one_attempt_and_is_left_out(
    network: Network, workers: list[Peer], rogue: Rogue
) -> None:
    """A stranger takes a place in the group, then sends nonsense on some streams and nothing on others."""
    digest = network.contract(3, failure_timeout_s=2.0, grace=600.0).digest
    key = current_key(workers, digest)

    async def take_a_place(worker: Peer) -> bytes:
        stub = Rendezvous.get_stub(rogue.p2p, PeerID.from_base58(worker.peer_id), namespace=NAMESPACE)
        messages = await stub.rpc_join_group(averaging_pb2.JoinRequest(group_key=key, gather=msgpack.packb(GOOD_OFFER)))
        async for message in messages:
            if message.code == averaging_pb2.BEGIN_ALLREDUCE:
                await messages.aclose()
                return bytes(message.group_id)
            if message.code == averaging_pb2.ACCEPTED and not arrived.done():
                arrived.set_result(None)
        return b""

    async def make_future() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    arrived = network.run(make_future())
    places = [network.start(take_a_place(worker)) for worker in workers]

    async def wait_for_a_place() -> None:
        await asyncio.wait_for(asyncio.shield(arrived), 30)

    network.run(wait_for_a_place())
    attempts = [worker.average() for worker in workers]
    (group_id,) = {place.result(30) for place in places} - {b""}
    header = struct.Struct("<BI")
    writers = [rogue.stream(worker, header.pack(1, 16) + group_id + os.urandom(3000)) for worker in workers[:2]]
    outcomes = [attempt.result(30) for attempt in attempts]
    assert all(rogue.identity.peer_id not in outcome.weights for outcome in outcomes)
    assert {outcome.verdict for outcome in outcomes} == {"retry"}
    assert all(rogue.identity.peer_id in outcome.failures for outcome in outcomes)
    commit_a_round(network, workers)

    async def close() -> None:
        for writer in writers:
            writer.close()

    network.run(close())


def test_unsigned_records_are_not_taken(network: Network, workers: list[Peer], rogue: Rogue) -> None:
    victim = workers[1].peer_id
    for subkey in (victim, rogue.identity.peer_id, "nobody", None, f"x/{victim}"):
        for value in (LIES, {}, b"", "text", None, 7, [LIES] * 10):
            assert not rogue.store(PROGRESS_KEY, subkey, value)
    for subkey in (f"test/{victim}", f"other/{rogue.identity.peer_id}", None):
        assert not rogue.store(RUNS_KEY, subkey, b"{}")
    assert list(workers[0].runs()) == ["test"]
    for _ in range(3):
        commit_a_round(network, workers)


def test_records_in_anothers_name_are_not_taken(network: Network, workers: list[Peer], signing_rogue: Rogue) -> None:
    victim = workers[1].peer_id
    assert not signing_rogue.store(PROGRESS_KEY, victim, LIES)
    assert not signing_rogue.store(RUNS_KEY, f"test/{victim}", b"{}")
    for _ in range(3):
        commit_a_round(network, workers)


def test_records_that_live_too_long_or_are_too_big_are_not_taken(
    network: Network, workers: list[Peer], signing_rogue: Rogue
) -> None:
    own = signing_rogue.identity.peer_id
    assert not signing_rogue.store(PROGRESS_KEY, own, LIES, lifetime_s=100_000.0)
    assert not signing_rogue.store(PROGRESS_KEY, own, bytes(100_000))
    commit_a_round(network, workers)


def test_own_records_that_say_nonsense_are_ignored(network: Network, workers: list[Peer], signing_rogue: Rogue) -> None:
    own = signing_rogue.identity.peer_id
    digest = network.contract(3, failure_timeout_s=2.0, grace=600.0).digest
    right = LIES | {"contract": digest, "round": 0}
    nonsense = [
        {},
        [],
        None,
        0,
        "text",
        b"\xff" * 60_000,
        {"round": 1},
        right | {"round": -1},
        right | {"round": 2**62},
        right | {"committed_tokens": 2**60},
        right | {"round": "1"},
        right | {"expected_finish": float("nan")},
        right | {"expected_finish": 1e300},
        right | {"started": -1.0},
        right | {"contract": "not hex"},
        right | {"lineage": "0" * 63},
        right | {"state": "king"},
        right | {"session": None},
    ]
    stored = [
        signing_rogue.store(PROGRESS_KEY, own, value, lifetime_s=60.0 + index) for index, value in enumerate(nonsense)
    ]
    assert any(stored)
    for index, value in enumerate((b"", b"{}", b"[" * 10_000, "text", None, {"run": 1}, b"\xff")):
        signing_rogue.store(RUNS_KEY, f"other/{own}", value, lifetime_s=60.0 + index)
    assert list(workers[0].runs()) == ["test"]
    for _ in range(3):
        commit_a_round(network, workers)
