"""Who reads which shard of the text: different ones, every shard once in a pass, whoever comes, goes or dies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from opendiloco.leases import AHEAD, Leases, choose_shard, keeps, read_alone
from opendiloco.ledger import MAX_OPEN, MAX_READINGS, SOURCE_SHARDS, Ledger, Reading, SourceLedger

SEQUENCES = 5  # in a shard
SHARDS = 1000  # in a pass


def done(shard: int) -> Reading:
    return Reading(shard=shard, sequences=SEQUENCES, done=True)


def at(shard: int, sequences: int) -> Reading:
    return Reading(shard=shard, sequences=sequences)


# --- the ledger ----------------------------------------------------------------------------------------


def test_a_ledger_knows_what_was_read_what_was_begun_and_what_was_left_out() -> None:
    ledger = SourceLedger().after({"a": (done(0), at(3, 2)), "b": (at(1, 4),)})
    assert ledger.untouched == 4
    assert ledger.open == (at(1, 4), at(2, 0), at(3, 2))
    assert ledger.readers == {"a": 3, "b": 1}
    assert [ledger.is_done(shard) for shard in range(6)] == [True, False, False, False, False, False]
    free = ledger.free()
    assert [next(free) for _ in range(4)] == [2, 4, 5, 6]  # 1 and 3 have their readers


def test_a_shard_whose_reader_took_no_part_in_the_next_round_is_free_where_it_was_left() -> None:
    ledger = SourceLedger().after({"a": (at(0, 3),), "b": (at(1, 2),)}).after({"a": (at(0, 4),)})
    assert next(ledger.free()) == 1
    assert ledger.reading(1) == at(1, 2)


def test_reading_never_goes_back_and_what_is_done_stays_done() -> None:
    ledger = SourceLedger().after({"a": (at(0, 3),), "b": (done(1),)})
    again = ledger.after({"a": (at(0, 2),), "b": (at(1, 1),)})
    assert (again.open, again.untouched) == (ledger.open, ledger.untouched)


def test_rounds_that_are_known_already_change_nothing() -> None:
    rounds = [{"a": (done(0), at(2, 1)), "b": (at(1, 4),)}, {"a": (done(2), at(4, 1)), "b": (done(1), at(3, 2))}]
    ledger = SourceLedger().after(rounds[0]).after(rounds[1])
    assert ledger.after(rounds[0]).after(rounds[1]) == ledger


def test_numbers_out_of_proportion_are_ignored() -> None:
    ledger = SourceLedger().after({"a": (at(2**40, 1),), "b": (at(0, 1),)})
    assert (ledger.untouched, len(ledger.open)) == (1, 1)
    for _ in range(3):
        ledger = ledger.after({"a": (at(ledger.untouched + MAX_OPEN - len(ledger.open) - 1, 1),)})
    assert len(ledger.open) <= MAX_OPEN
    assert SourceLedger.model_validate_json(ledger.model_dump_json()) == ledger


@pytest.mark.parametrize(
    "bad",
    [
        '{"untouched": 1, "open": [{"shard": 9}]}',
        '{"untouched": 9, "open": [{"shard": 3}, {"shard": 3}]}',
        '{"untouched": -1}',
        '{"open": [{"shard": "1"}]}',
        '{"readers": {"": 1}}',
        '{"more": 1}',
        "[]",
    ],
)
def test_a_malformed_ledger_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError):
        SourceLedger.model_validate_json(bad)


# --- choices -------------------------------------------------------------------------------------------


def test_workers_that_know_the_same_ledger_never_choose_the_same_shard() -> None:
    """Whatever they know of each other's choices since."""
    ledger = SourceLedger().after({peer: (at(shard, 1),) for shard, peer in enumerate("abc")})
    chosen = [
        choose_shard(ledger, peer, shards=SHARDS, claims={peer: []}, chosen=count)
        for peer in "abc"
        for count in range(10)
    ]
    assert sorted(chosen) == list(range(3, 33))


@given(st.sets(st.integers(0, 30)), st.integers(2, 5), st.integers(0, 3))
def test_claims_of_others_never_drive_two_participants_together(foreign: set[int], count: int, chosen: int) -> None:
    """Somebody who died or has just come holds any of the free shards."""
    names = [f"reader {index}" for index in range(count)]
    ledger = SourceLedger().after({name: (at(2 * index, 1),) for index, name in enumerate(names)})
    claims = {"other": sorted(foreign), **{name: [2 * index] for index, name in enumerate(names)}}
    found = [choose_shard(ledger, name, shards=SHARDS, claims=claims, chosen=chosen) for name in names]
    assert len(set(found)) == count
    assert not set(found) & foreign


def test_workers_that_start_together_begin_with_different_shards() -> None:
    names = ["a", "b", "c", "d"]
    first = [
        Leases(name).lease(None, Ledger(), {other: () for other in names if other != name}, shards=SHARDS)
        for name in names
    ]
    assert sorted(reading.shard for reading in first) == [0, 1, 2, 3]


def test_a_latecomer_leaves_alone_what_the_others_have_leased() -> None:
    ledger = Ledger().after({"a": (at(0, 1),), "b": (at(1, 1),)})
    claims = {"a": [0, 3], "b": [1, 2, 4]}
    late = Leases("late").lease(None, ledger, claims, shards=SHARDS).shard
    assert late not in {*claims["a"], *claims["b"]}
    assert late not in {choose_shard(ledger.of(0), peer, shards=SHARDS, claims=claims, chosen=1) for peer in "ab"}


@pytest.mark.parametrize("source", [0, 3])
@given(shards=st.integers(2, 40), read=st.integers(1, 80), participants=st.integers(1, 5), newcomers=st.integers(1, 5))
def test_newcomers_begin_no_pass_while_shards_of_this_one_are_nobodys(
    source: int, shards: int, read: int, participants: int, newcomers: int
) -> None:
    """Though they leave alone what the participants need next, as long as there is more."""
    base, names = source * SOURCE_SHARDS, [f"reader {index}" for index in range(participants)]
    ledger = SourceLedger(
        untouched=base + read, readers={name: base + max(0, read - 1 - index) for index, name in enumerate(names)}
    )
    claims: dict[str, list[int]] = {name: [shard] for name, shard in ledger.readers.items()}
    claims |= {f"newcomer {index}": [] for index in range(newcomers)}
    left = list(range(base + read, base + (read // shards + 1) * shards))  # of the pass
    for index in range(newcomers):
        name = f"newcomer {index}"
        shard = choose_shard(ledger, name, shards=shards, claims=claims, chosen=0)
        nobodys = [each for each in left if not any(each in claimed for claimed in claims.values())]
        assert shard in nobodys or len(nobodys) < newcomers, (shard, nobodys)
        if len(left) >= AHEAD * participants + newcomers:
            assert shard >= left[AHEAD * participants]
        claims[name].append(shard)


def test_of_two_with_one_shard_exactly_one_moves_on() -> None:
    ledger = Ledger().after({"a": (at(0, 1),), "b": (at(0, 2),)})
    moved = []
    for name, other in (("a", "b"), ("b", "a")):
        leases = Leases(name)
        reading = leases.lease(at(0, 2), ledger, {other: [0]}, shards=SHARDS)
        assert leases.claims[-1] == reading.shard
        moved.append(reading.shard != 0)
    assert sorted(moved) == [False, True]
    assert keeps("a", 0, ["b"]) != keeps("b", 0, ["a"])


def test_a_worker_that_comes_back_goes_on_where_it_was_unless_others_have_been_there() -> None:
    ledger = Ledger().after({"a": (at(0, 3),), "b": (at(1, 2),)})
    assert Leases("a").lease(at(0, 3), ledger, {"b": [1]}, shards=SHARDS) == at(0, 3)
    assert Leases("a").lease(at(0, 5), ledger, {"b": [1]}, shards=SHARDS) == at(0, 5)  # work that is in no round yet
    further = ledger.after({"b": (at(0, 4),)})
    assert Leases("a").lease(at(0, 3), further, {"b": [7]}, shards=SHARDS) == at(0, 4)
    finished = ledger.after({"b": (done(0), at(1, 3))})
    assert Leases("a").lease(at(0, 3), finished, {"b": [1]}, shards=SHARDS).shard not in (0, 1)


def test_claims_stand_until_a_round_counts_what_was_read() -> None:
    leases = Leases("a")
    first = leases.lease(None, Ledger(), {}, shards=SHARDS)
    second = leases.lease(done(first.shard), Ledger(), {}, shards=SHARDS)
    assert leases.claims == [first.shard, second.shard]
    leases.settle(Ledger())  # a round without this worker
    assert leases.claims == [first.shard, second.shard]
    leases.settle(Ledger().after({"a": (done(first.shard), at(second.shard, 1))}))
    assert leases.claims == [second.shard]


def test_more_claims_than_a_record_holds_drop_the_oldest() -> None:
    leases, reading = Leases("a"), None
    for _ in range(2 * MAX_READINGS):
        reading = leases.lease(done(reading.shard) if reading else None, Ledger(), {}, shards=SHARDS)
    assert reading is not None
    assert len(leases.claims) == MAX_READINGS
    assert leases.claims[-1] == reading.shard


def test_a_worker_by_itself_reads_shard_after_shard() -> None:
    first = read_alone(None, 0, SHARDS)
    assert (first.shard, read_alone(first, 0, SHARDS), read_alone(done(0), 0, SHARDS).shard) == (0, first, 1)


# --- a swarm of readers --------------------------------------------------------------------------------


@dataclass
class Reader:
    """A worker as far as reading goes: it takes sequences from where its lease says."""

    name: str
    leases: Leases = field(init=False)
    reading: Reading | None = None
    finished: list[Reading] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Shard and number of every sequence since the last round."""

    def __post_init__(self) -> None:
        self.leases = Leases(self.name)

    def read(self, count: int, ledger: Ledger, others: Sequence[Reader]) -> None:
        claims = {other.name: list(other.leases.claims) for other in others if other is not self}
        self.reading = self.leases.lease(self.reading, ledger, claims, shards=SHARDS)
        for _ in range(count):
            while self.reading.sequences == SEQUENCES:
                self.finished.append(done(self.reading.shard))
                self.reading = self.leases.lease(self.finished[-1], ledger, claims, shards=SHARDS)
            self.taken.append((self.reading.shard, self.reading.sequences))
            self.reading = at(self.reading.shard, self.reading.sequences + 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_every_sequence_is_in_one_round_once_however_fast_the_readers_and_whoever_dies(
    seed: int, count: int, others_are_seen: bool
) -> None:
    draw = random.Random(seed)
    readers = [Reader(f"reader {index}") for index in range(count)]
    ledger, counted, names = Ledger(), list[tuple[int, int]](), count
    for _ in range(30):
        steady = {reader.name for reader in readers} == ledger.of(0).readers.keys()
        sees = others_are_seen or not steady  # those that came or went are known to all
        for reader in readers:
            reader.read(draw.randint(0, 13), ledger, readers if sees else [])
        dead = {reader.name for reader in readers if len(readers) > 1 and draw.random() < 0.05}
        part = [reader for reader in readers if reader.name not in dead] or readers
        ledger = ledger.after({r.name: (*r.finished, r.reading) for r in part if r.reading is not None})
        for reader in part:
            counted += reader.taken
            reader.taken, reader.finished = [], []
            reader.leases.settle(ledger)
        readers = part
        if draw.random() < 0.1:
            readers.append(Reader(f"reader {(names := names + 1)}"))
    assert len(counted) == len(set(counted))
    read = set(counted)
    for shard in range(ledger.of(0).untouched):
        reading = ledger.reading(shard)
        until = SEQUENCES if reading is None else reading.sequences
        assert {(shard, number) for number in range(until)} <= read
