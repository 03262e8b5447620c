"""Records on the DHT: only their owner's, only small and short-lived ones, and nothing a stranger sends raises."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, ValueWithExpiration
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opendiloco import membership
from opendiloco.claims import MAX_LIFETIME_S, Progress, Told
from opendiloco.config import Contract, contract_to_wire
from opendiloco.identity import Identity, peer_id_of
from opendiloco.membership import MAX_RECORD_BYTES, Membership, SignedRecords
from opendiloco.rounds import MAX_STRETCH, USUAL_WORKERS

OWNER = Identity(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
STRANGER = Identity(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))
KEY = DHTID.generate("demo.progress").to_bytes()
ANYBODY = SignedRecords(STRANGER)  # what a record's owner is makes no difference to who checks it


def record_of(
    identity: Identity = OWNER,
    *,
    owner: Identity | None = None,
    prefix: str = "",
    value: bytes | None = None,
    lifetime_s: float = 60.0,
) -> DHTRecord:
    """A record as hivemind stores it, signed by `identity` under the name of `owner`."""
    inner = MSGPackSerializer.dumps({"round": 3}) if value is None else value
    subkey = MSGPackSerializer.dumps(prefix + (owner or identity).peer_id)
    record = DHTRecord(KEY, subkey, inner, time.time() + lifetime_s)
    return replace(record, value=SignedRecords(identity).sign_value(record))


RECORD = record_of()
VALUE, PUBLIC_KEY, SIGNATURE = msgpack.unpackb(RECORD.value)


def with_envelope(*fields: object) -> DHTRecord:
    """RECORD with other fields in place of its value, public key and signature."""
    return replace(RECORD, value=msgpack.packb(list(fields)))


# --- the owner's records -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "demo/", "a/b/"])
def test_the_owners_record_is_taken_and_gives_back_its_value(prefix: str) -> None:
    record = record_of(prefix=prefix)
    assert ANYBODY.validate(record)
    assert MSGPackSerializer.loads(ANYBODY.strip_value(record)) == {"round": 3}


def test_an_rsa_identity_can_sign_too() -> None:
    assert ANYBODY.validate(record_of(Identity(rsa.generate_private_key(65537, 2048))))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.binary(), st.lists, max_leaves=8))
def test_any_value_comes_back_as_it_was(value: object) -> None:
    packed = MSGPackSerializer.dumps(value)
    record = record_of(value=packed)
    assert ANYBODY.validate(record)
    assert ANYBODY.strip_value(record) == packed


# --- everybody else's ----------------------------------------------------------------------------------


def test_a_record_in_another_peers_name_is_refused() -> None:
    assert not ANYBODY.validate(record_of(STRANGER, owner=OWNER))
    assert not ANYBODY.validate(record_of(STRANGER, owner=OWNER, prefix="demo/"))


def test_the_owners_key_does_not_cover_a_strangers_signature() -> None:
    forged = SignedRecords(STRANGER).sign_value(replace(RECORD, value=VALUE))
    assert not ANYBODY.validate(with_envelope(VALUE, PUBLIC_KEY, msgpack.unpackb(forged)[2]))
    assert ANYBODY.validate(with_envelope(VALUE, PUBLIC_KEY, SIGNATURE))


@pytest.mark.parametrize(
    "subkey",
    [
        DHTProtocol.IS_REGULAR_VALUE,
        b"\xc1",
        MSGPackSerializer.dumps(""),
        MSGPackSerializer.dumps(7),
        MSGPackSerializer.dumps([OWNER.peer_id]),
        MSGPackSerializer.dumps(OWNER.peer_id.encode()),
        MSGPackSerializer.dumps(OWNER.peer_id + "/"),
        MSGPackSerializer.dumps(OWNER.peer_id + "/demo"),
        MSGPackSerializer.dumps("x" + OWNER.peer_id),
    ],
)
def test_a_record_that_does_not_end_with_its_owners_name_is_refused(subkey: bytes) -> None:
    record = replace(record_of(), subkey=subkey)
    value = MSGPackSerializer.dumps({"round": 3})
    signed = replace(record, value=SignedRecords(OWNER).sign_value(replace(record, value=value)))
    assert not ANYBODY.validate(signed)


ALTERATIONS: dict[str, Callable[[DHTRecord], DHTRecord]] = {
    "another key": lambda record: replace(record, key=DHTID.generate("other.progress").to_bytes()),
    "another place": lambda record: replace(record, subkey=MSGPackSerializer.dumps(f"demo/{OWNER.peer_id}")),
    "longer life": lambda record: replace(record, expiration_time=record.expiration_time + 1e-3),
    "shorter life": lambda record: replace(record, expiration_time=record.expiration_time - 1e-3),
    "another value": lambda record: replace(
        record, value=msgpack.packb([MSGPackSerializer.dumps({"round": 4}), *msgpack.unpackb(record.value)[1:]])
    ),
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS.keys())
def test_an_altered_record_is_refused(alter: Callable[[DHTRecord], DHTRecord]) -> None:
    assert not ANYBODY.validate(alter(record_of()))


@given(st.data())
def test_no_flipped_bit_goes_unseen(data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(RECORD.value) - 1))
    altered = bytearray(RECORD.value)
    altered[bit // 8] ^= 1 << bit % 8
    assert not ANYBODY.validate(replace(RECORD, value=bytes(altered)))


# --- sizes and times -----------------------------------------------------------------------------------


def test_a_record_may_be_as_large_as_the_limit_and_no_larger() -> None:
    overhead = len(record_of(value=bytes(40_000)).value) - 40_000
    assert ANYBODY.validate(record_of(value=MSGPackSerializer.dumps(bytes(MAX_RECORD_BYTES - overhead - 3))))
    assert not ANYBODY.validate(record_of(value=MSGPackSerializer.dumps(bytes(MAX_RECORD_BYTES - overhead - 2))))


@pytest.mark.parametrize("lifetime_s", [MAX_LIFETIME_S + 5, 1e9, math.inf, math.nan])
def test_a_record_that_lives_too_long_is_refused(lifetime_s: float) -> None:
    assert not ANYBODY.validate(record_of(lifetime_s=lifetime_s))


def test_a_record_may_live_as_long_as_the_limit() -> None:
    assert ANYBODY.validate(record_of(lifetime_s=MAX_LIFETIME_S))


# --- what strangers may send ---------------------------------------------------------------------------


def check_harmless(record: DHTRecord) -> None:
    """Whatever is let through can be read by every peer that looks it up: one that raises would spoil its search."""
    if ANYBODY.validate(record):
        MSGPackSerializer.loads(ANYBODY.strip_value(record))


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.binary(), inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=300), st.binary(max_size=80), st.floats())
def test_no_bytes_raise(value: bytes, subkey: bytes, expiration: float) -> None:
    check_harmless(DHTRecord(KEY, subkey, value, expiration))
    check_harmless(replace(RECORD, value=value))


@given(junk)
def test_no_message_raises(message: object) -> None:
    check_harmless(replace(RECORD, value=msgpack.packb(message)))


@given(st.lists(st.sampled_from(["value", "key", "signature"]) | junk, min_size=3, max_size=3))
def test_no_envelope_of_the_right_length_raises(fields: list[object]) -> None:
    names = {"value": VALUE, "key": PUBLIC_KEY, "signature": SIGNATURE}
    check_harmless(with_envelope(*(names.get(f, f) if isinstance(f, str) else f for f in fields)))


@pytest.mark.parametrize("number", [0, 2**28, 2**40, 2**62, 2**64 - 1, -1])
def test_a_number_in_the_place_of_bytes_is_refused_and_allocates_nothing(number: int) -> None:
    record = with_envelope(number, PUBLIC_KEY, SIGNATURE)
    tracemalloc.start()
    try:
        assert not ANYBODY.validate(record)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_an_envelope_that_is_a_map_is_refused_or_readable() -> None:
    """Its three keys unpack like the three fields of a list."""
    check_harmless(replace(RECORD, value=msgpack.packb({VALUE: 0, PUBLIC_KEY: 0, SIGNATURE: 0})))


@pytest.mark.parametrize(
    "value", [b"", b"\xc1", b"\xff\xff", b"\x81", b"\xd4\x70\x00", msgpack.packb(msgpack.ExtType(0x52, b"junk"))]
)
def test_a_signed_value_that_no_peer_can_read_is_refused(value: bytes) -> None:
    check_harmless(record_of(value=value))


def test_a_strangers_unknown_kind_of_key_is_refused() -> None:
    der = bytes.fromhex(f"302a300506032a0304032100{'11' * 32}")  # SubjectPublicKeyInfo of algorithm 1.2.3.4
    key = b"\x08\x00\x12" + bytes([len(der)]) + der
    record = replace(record_of(), subkey=MSGPackSerializer.dumps(peer_id_of(key)))
    assert not ANYBODY.validate(replace(record, value=msgpack.packb([b"\x01", key, bytes(64)])))


def test_a_deeply_nested_message_is_refused() -> None:
    assert not ANYBODY.validate(replace(record_of(), value=b"\x91" * (MAX_RECORD_BYTES - 1)))
    assert not ANYBODY.validate(replace(record_of(), subkey=b"\x91" * 10_000))


# --- what a worker says about itself -------------------------------------------------------------------


def progress(**changes: object) -> dict[str, object]:
    now = time.time()
    values = {
        "session": "0123456789abcdef",
        "committed_tokens": 0,
        "started": now,
        "issued": now,
        "contract": "a" * 64,
        "layout": "b" * 64,
        "round": 3,
        "lineage": "c" * 64,
        "params_hash": "d" * 64,
        "hashed_round": 2,
        "state": "training",
        "steps": 17,
        "tokens_per_s": 1234.5,
        "expected_finish": now + 10,
        "client_mode": False,
        "shards": [3, 17],
    }
    return values | changes


def test_progress_travels_unchanged() -> None:
    sent = Progress.model_validate(progress())
    assert Progress.model_validate(MSGPackSerializer.loads(MSGPackSerializer.dumps(sent.model_dump()))) == sent


def test_progress_of_a_later_version_may_say_more() -> None:
    values = progress()
    assert Progress.model_validate(values | {"new_field": 1}) == Progress.model_validate(values)


@pytest.mark.parametrize(
    "change",
    [
        {"round": -1},
        {"round": 2**41},
        {"round": "3"},
        {"round": 3.0},
        {"round": True},
        {"steps": None},
        {"tokens_per_s": math.nan},
        {"tokens_per_s": math.inf},
        {"tokens_per_s": -1.0},
        {"expected_finish": 1e12},
        {"expected_finish": math.nan},
        {"state": "resting"},
        {"lineage": "c" * 63},
        {"lineage": "C" * 64},
        {"lineage": "c" * 64 + "\n"},
        {"session": "0123456789abcdef0"},
        {"client_mode": 1},
        {"shards": [-1]},
        {"shards": ["1"]},
        {"shards": list(range(33))},
        {"params_hash": b"d" * 64},
        {"round": 0, "committed_tokens": 1},
    ],
    ids=str,
)
def test_progress_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Progress.model_validate(progress(**change))


@given(st.dictionaries(st.sampled_from(sorted(progress())), junk, min_size=1) | junk)
def test_no_progress_record_raises_anything_else(message: object) -> None:
    values = progress() | message if isinstance(message, dict) else message
    try:
        Progress.model_validate(values)
    except ValidationError:
        return


# --- what this peer makes of it --------------------------------------------------------------------------


class Dht:
    """Stands for a DHT node: `held` by key and subkey, a read that takes as long as `patience`."""

    def __init__(self, **held: dict[str, Any]) -> None:
        self.held = {key.replace("_", "."): values for key, values in held.items()}
        self.stored: list[tuple[str, str]] = []
        self.expirations: list[float] = []
        self.answers = True
        self.asked: list[str] = []

    async def get(self, key: str, *, latest: bool) -> Any:
        self.asked.append(key)
        if not self.answers:
            await asyncio.Event().wait()
        until = time.time() + 60
        found = {subkey: ValueWithExpiration(value, until) for subkey, value in self.held.get(key, {}).items()}
        return ValueWithExpiration(found, until)

    async def store(self, key: str, value: Any, *, expiration_time: float, subkey: str) -> bool:
        self.stored.append((key, subkey))
        self.expirations.append(expiration_time)
        return True


def member(dht: Dht, **settings: Any) -> Membership:
    return Membership(cast(Any, dht), OWNER, **{"expiry_s": 12.0, "run_id": "run"} | settings)


def contract(steps: int = 100, run_id: str = "run") -> Contract:
    return Contract.model_validate({"run": {"id": run_id}, "inner": {"steps": steps}})


THEIRS = contract_to_wire(contract(7))


def test_only_a_plain_peer_id_names_a_worker() -> None:
    """Whoever owns a record may put anything before its id, also more than another peer takes for one."""
    names = [STRANGER.peer_id, f"{'A' * 200}/{STRANGER.peer_id}", f"/{STRANGER.peer_id}", f"run/{STRANGER.peer_id}"]
    one = member(Dht(run_progress={name: progress() for name in names}))
    asyncio.run(one.refresh())
    assert set(one.view) == set(one.known) == {STRANGER.peer_id}


def test_a_dht_that_does_not_answer_in_time_shows_nothing_and_forgets_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "READ_LIMIT_S", 0.001)
    dht = Dht(run_progress={STRANGER.peer_id: progress()}, opendiloco_runs={f"run/{STRANGER.peer_id}": THEIRS})
    one = member(dht)
    asyncio.run(one.refresh())
    dht.answers = False
    asyncio.run(one.refresh())
    assert set(one.view) == {STRANGER.peer_id}
    assert asyncio.run(one.find_runs()) == {}
    asyncio.run(one.publish_contract(contract()))
    assert dht.stored == [(membership.RUNS_KEY, f"run/{OWNER.peer_id}")]
    assert sum("did not answer" in message for message in caplog.messages) == 3


def test_two_looks_at_the_workers_fit_into_the_life_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def timeout(limit_s: float) -> contextlib.AbstractAsyncContextManager[None]:
        limits.append(limit_s)
        return contextlib.nullcontext()

    monkeypatch.setattr(membership, "asyncio", SimpleNamespace(timeout=timeout))
    for expiry_s in (12.0, 3600.0):
        asyncio.run(member(Dht(), expiry_s=expiry_s).refresh())
    assert limits == [4.0, membership.READ_LIMIT_S]


def test_only_copies_of_ones_own_contract_count_as_copies() -> None:
    wire, now = contract_to_wire(contract()), [f"run/{name}" for name in "abc"]
    full = Dht(opendiloco_runs=dict.fromkeys(now, wire))
    asyncio.run(member(full).publish_contract(contract()))
    assert full.stored == []
    for junk in (
        dict.fromkeys(now, THEIRS),
        dict.fromkeys(now, b"junk"),
        {f"run/{x}/{STRANGER.peer_id}": wire for x in "abc"},  # three places of one owner
    ):
        dht = Dht(opendiloco_runs=junk)
        asyncio.run(member(dht).publish_contract(contract()))
        assert dht.stored == [(membership.RUNS_KEY, f"run/{OWNER.peer_id}")]


def test_of_several_contracts_of_a_run_the_one_counts_that_most_workers_with_committed_rounds_follow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = contract()
    standing = progress(contract=ours.digest, committed_tokens=10)
    workers = {"a": standing, "b": standing, STRANGER.peer_id: standing | {"contract": contract(7).digest}}
    copies = {"run/a": contract_to_wire(ours), f"run/{STRANGER.peer_id}": THEIRS}
    dht = Dht(opendiloco_runs=copies, run_progress=workers)
    assert asyncio.run(member(dht).find_runs()) == {"run": [ours]}
    assert "2 of 3 workers with committed rounds follow" in caplog.messages[-1]
    for undecided in ({"a": standing, STRANGER.peer_id: workers[STRANGER.peer_id]}, {"a": progress()}, {}):
        dht.held["run.progress"] = undecided
        assert len(asyncio.run(member(dht).find_runs())["run"]) == 2
    dht.held["run.progress"] = {"a": standing | {"contract": "e" * 64}}  # nobody's on the DHT
    assert len(asyncio.run(member(dht).find_runs())["run"]) == 2


def test_a_flood_of_runs_costs_a_bounded_number_of_look_ups_and_hides_no_run_that_is_named() -> None:
    flood = {f"run-{number}/a": contract_to_wire(contract(run_id=f"run-{number}")) for number in range(300)}
    ours = {f"run/{peer}": contract_to_wire(contract()) for peer in ("a", "b", "c")}
    dht = Dht(opendiloco_runs={**flood, **ours})
    found = asyncio.run(member(dht).find_runs())
    assert (len(found), found["run"]) == (membership.MAX_RUNS, [contract()])
    assert len(dht.asked) == 1 + membership.MAX_RUNS
    dht.asked.clear()
    assert asyncio.run(member(dht).find_runs("run-299")) == {"run-299": [contract(run_id="run-299")]}
    assert dht.asked == [membership.RUNS_KEY, "run-299.progress"]


def test_a_run_whose_workers_have_gone_is_one_to_compare_with_and_none_to_join() -> None:
    dht = Dht(opendiloco_runs={f"run/{STRANGER.peer_id}": THEIRS})
    for gone in ({}, {STRANGER.peer_id: progress(state="left")}):
        dht.held["run.progress"] = gone
        assert asyncio.run(member(dht).find_runs(with_workers=True)) == {}
        assert list(asyncio.run(member(dht).find_runs())) == ["run"]
    dht.held["run.progress"] = {STRANGER.peer_id: progress()}
    assert list(asyncio.run(member(dht).find_runs(with_workers=True))) == ["run"]


def names(count: int) -> list[str]:
    return [Identity(ed25519.Ed25519PrivateKey.generate()).peer_id for _ in range(count)]


@pytest.mark.parametrize(("others", "stretch"), [(0, 1.0), (USUAL_WORKERS - 1, 1.0), (2 * USUAL_WORKERS - 1, 2.0)])
def test_beats_slow_down_and_records_live_longer_in_a_large_swarm(others: int, stretch: float) -> None:
    """Otherwise what is read grows with the square of the number of workers."""
    dht = Dht(run_progress={name: progress() for name in names(others)})
    one = member(dht)
    asyncio.run(one.refresh())
    assert (len(one.view), one.stretch, one.lifetime_s) == (others, stretch, 12.0 * stretch)
    asyncio.run(one.announce(Progress.model_validate(progress())))
    assert dht.expirations[-1] - time.time() == pytest.approx(12.0 * stretch, abs=5)


def test_no_number_of_records_makes_a_worker_fall_silent() -> None:
    dht = Dht(run_progress={f"{number:052}": progress() for number in range(2 * int(MAX_STRETCH) * USUAL_WORKERS)})
    one = member(dht)
    asyncio.run(one.refresh())
    assert one.stretch == MAX_STRETCH
    assert one.lifetime_s < MAX_LIFETIME_S


def test_whoever_only_looks_gets_all_that_makes_sense() -> None:
    tells = Told(session="0" * 16, version="0.1.0")
    one = member(
        Dht(
            run_progress={"a": progress(), "b": {"round": "x"}, f"run/{STRANGER.peer_id}": progress()},
            run_told={"a": tells.model_dump(), "c": tells.model_dump(), "d": {"version": "<b>"}},
        ),
        run_id="",
    )
    seen = asyncio.run(one.observe("run"))
    assert {peer: (found.progress is not None, found.told == tells) for peer, found in seen.items()} == {
        "a": (True, True),
        "b": (False, False),
        "c": (False, True),
        "d": (False, False),
    }
