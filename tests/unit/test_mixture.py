"""Claims about several sources in one run: shares that never drift, and shards, passes and leases of each source."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opendiloco.config import Contract, DataConfig, contract_from_wire, contract_to_wire
from opendiloco.errors import SettingsError
from opendiloco.leases import Leases
from opendiloco.ledger import MAX_READINGS, SOURCE_SHARDS, Ledger, Reading, source_of
from opendiloco.mixture import check_sources, mixture, split_sources
from opendiloco.settings import load_settings, write_toml
from opendiloco.tokenizer import ByteTokenizer
from opendiloco.tokens import TokenStream, training_stream, validation_batches

BYTES = ByteTokenizer()


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A small source and one that is ten times as large, half of the sequences from each."""
    for name, lines in (("small", 200), ("large", 2000)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(lines)))
    return of(tmp_path, "1 text:{}/small.txt", "1 text:{}/large.txt")


def of(place: Path, *sources: str, seq_len: int = 16, shards: int = 4) -> DataConfig:
    source = tuple(source.format(place) for source in sources)
    return DataConfig(source=source, seq_len=seq_len, shards=shards, validation_sequences=10)


def names_in(rows: torch.Tensor) -> list[str]:
    """Which of the two sources each row is of."""
    found = [re.findall("small|large|sma|lar|mall|arge", BYTES.decode(row)) for row in rows.tolist()]
    return ["small" if {"small", "sma", "mall"} & set(each) else "large" for each in found]


# --- shares --------------------------------------------------------------------------------------------


@given(
    st.lists(st.fractions(Fraction(1, 1000), 1000, max_denominator=1000), min_size=1, max_size=16), st.integers(0, 9)
)
def test_after_any_number_of_sequences_no_source_is_a_whole_one_from_its_share(
    weights: list[Fraction], seed: int
) -> None:
    mix, taken = mixture(weights, seed=seed), [0] * len(weights)
    for number in range(1, 60):
        taken[mix.next_source(taken)] += 1
        assert all(
            abs(count - weight / sum(weights) * number) < 1 for count, weight in zip(taken, weights, strict=True)
        )


def test_the_seed_decides_what_the_weights_leave_open_and_nothing_else_does() -> None:
    first = [mixture([Fraction(1)] * 3, seed=seed).next_source([0, 0, 0]) for seed in range(20)]
    assert set(first) == {0, 1, 2}
    assert first == [mixture([Fraction(7, 3)] * 3, seed=seed).next_source([0, 0, 0]) for seed in range(20)]


def test_batches_hold_the_shares_and_the_small_source_is_read_again_and_again(
    data: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    stream = training_stream(data, BYTES, seed=0, batch_size=8)
    with caplog.at_level(logging.INFO, "opendiloco"):
        counts = [Counter(names_in(batch))["small"] for batch in islice(stream, 100)]
    assert {3, 4, 5} >= set(counts)
    assert sum(counts) in range(390, 411)
    lines = [record.getMessage() for record in caplog.records]
    assert any(re.fullmatch(r"pass 3 over text:.*/small\.txt begins", line) for line in lines)
    assert not any("large" in line for line in lines)


@pytest.mark.parametrize("batches", [0, 1, 25, 100])
def test_a_mixture_resumes_with_the_same_next_batch(data: DataConfig, batches: int) -> None:
    def stream() -> TokenStream:
        return training_stream(data, BYTES, seed=0, batch_size=3)

    going_on = stream()
    for _ in range(batches):
        next(going_on)
    resumed = stream()
    next(resumed)
    resumed.load_state_dict(json.loads(json.dumps(going_on.state_dict())))
    for _ in range(20):
        assert torch.equal(next(resumed), next(going_on))
    assert resumed.state_dict() == going_on.state_dict()


def test_a_position_among_other_sources_is_refused_and_changes_nothing(data: DataConfig, tmp_path: Path) -> None:
    other = of(tmp_path, "1 text:{}/small.txt", "1 text:{}/small.txt")
    alone = of(tmp_path, "1 text:{}/small.txt")
    stream = training_stream(data, BYTES, seed=0, batch_size=3)
    next(stream)
    before = stream.state_dict()
    for data, match in ((other, "restore the text"), (alone, "names 2 sources and had 1 at the checkpoint")):
        with pytest.raises(SettingsError, match=match):
            stream.load_state_dict(training_stream(data, BYTES, seed=0, batch_size=3).state_dict())
        assert stream.state_dict() == before


def test_each_source_holds_out_its_own_part_in_proportion_and_at_least_one_sequence(tmp_path: Path) -> None:
    for name, lines in (("small", 2000), ("large", 2000)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(lines)))
    for weights, share in ((("1", "1"), 5), (("0.2", "0.8"), 2), (("0.0001", "1"), 1)):
        sources = [f"{weight} text:{{}}/{name}.txt" for weight, name in zip(weights, ("small", "large"), strict=True)]
        data = of(tmp_path, *sources)
        data = data.model_copy(update={"validation_fraction": 0.3})
        rows = torch.cat(validation_batches(data, BYTES, batch_size=4))
        assert Counter(names_in(rows))["small"] == share
        held = {tuple(row) for row in rows.tolist()}
        stream = training_stream(data, BYTES, seed=0, batch_size=8)
        assert not held & {tuple(row) for batch in islice(stream, 100) for row in batch.tolist()}


# --- the ledger ----------------------------------------------------------------------------------------


def test_every_source_has_its_own_part_of_the_ledger() -> None:
    second = SOURCE_SHARDS
    ledger = Ledger().after(
        {"a": (Reading(shard=7, done=True), Reading(shard=second, sequences=3)), "b": (Reading(shard=second + 1),)}
    )
    assert (ledger.of(0).untouched, ledger.of(1).untouched) == (8, second + 2)
    assert [ledger.of(source).readers for source in (0, 1, 2)] == [{"a": 7}, {"a": second, "b": second + 1}, {}]
    assert ledger.of(2).untouched == 2 * SOURCE_SHARDS
    assert ledger.is_done(7)
    assert not ledger.is_done(second)
    assert ledger.reading(second) == Reading(shard=second, sequences=3)
    assert Ledger.model_validate_json(ledger.model_dump_json()) == ledger
    assert Ledger().after({"a": (Reading(shard=200 * SOURCE_SHARDS),)}) == Ledger()
    with pytest.raises(ValidationError, match="shards of another source"):
        Ledger.model_validate_json('{"sources": [{"untouched": 1}, {"untouched": 1}]}')


def test_workers_lease_different_shards_of_each_source_and_keep_what_they_read_now() -> None:
    """Also when shards of one source are so small that they fill the record."""
    leases = {name: Leases(name) for name in "abc"}
    ledger = Ledger()
    at: dict[tuple[str, int], Reading] = {}
    for turn in range(3 * MAX_READINGS):
        for name, own in leases.items():
            others = {other: list(theirs.claims) for other, theirs in leases.items() if other != name}
            for source in (0, 1):
                place = at.get((name, source))
                if place is not None and source == 0:
                    place = place.model_copy(update={"done": True})
                at[name, source] = own.lease(place, ledger, others, shards=1000, source=source)
                assert source_of(at[name, source].shard) == source
        assert len({reading.shard for reading in at.values()}) == 6, turn
    assert all(at[name, source].shard in own.claims for name, own in leases.items() for source in (0, 1))
    assert all(len(own.claims) <= MAX_READINGS for own in leases.values())


def test_workers_of_one_run_read_every_sequence_of_each_source_once_in_a_pass(data: DataConfig) -> None:
    """Three workers of unequal speed and their ledger, until the small source has been read to its end."""
    data = data.model_copy(update={"shards": 8})
    names, ledger, draw = ["a", "b", "c"], Ledger(), random.Random(0)
    leases = {name: Leases(name) for name in names}

    def lease_of(name: str) -> TokenStream:
        def lease(at: Reading | None, source: int, shards: int) -> Reading:
            others = {other: list(leases[other].claims) for other in names if other != name}
            return leases[name].lease(at, ledger, others, shards=shards, source=source)

        return training_stream(data, BYTES, seed=0, batch_size=1, lease=lease)

    streams = {name: lease_of(name) for name in names}
    alone = training_stream(
        data.model_copy(update={"source": split_sources(data)[0][0].source}), BYTES, seed=0, batch_size=1
    )
    first_pass = [
        tuple(batch[0].tolist())
        for batch in itertools.takewhile(lambda _: alone.readings[-1].shard < alone.shards, alone)
    ]
    seen = Counter[tuple[int, ...]]()
    while not all(ledger.is_done(shard) for shard in range(alone.shards)):
        for stream in streams.values():
            for batch in islice(stream, draw.randint(1, 4)):
                seen[tuple(batch[0].tolist())] += 1
        ledger = ledger.after({name: stream.readings for name, stream in streams.items()})
        for name, stream in streams.items():
            leases[name].settle(ledger)
            stream.renew(reported=True)
    assert [seen[sequence] for sequence in first_pass] == [1] * len(first_pass)
    assert ledger.of(1).untouched - SOURCE_SHARDS <= 8


# --- settings ------------------------------------------------------------------------------------------


def test_a_list_of_sources_is_a_setting_like_others(tmp_path: Path) -> None:
    wanted = ("0.7 text:a.txt", "0.3 text:b.txt")
    given = load_settings(overrides=['data.source=["0.7 text:a.txt", "0.3 text:b.txt"]'])
    assert given.contract.data.source == wanted
    write_toml(tmp_path / "run.toml", given.contract)
    assert load_settings(tmp_path / "run.toml").contract == given.contract
    assert contract_from_wire(contract_to_wire(given.contract)) == given.contract
    assert given.contract.digest != Contract().digest
    assert load_settings(overrides=["data.source=text:a"]).contract.data.source == "text:a"
    sources, weights = split_sources(given.contract.data)
    assert [source.source for source in sources] == ["text:a.txt", "text:b.txt"]
    assert weights == [Fraction(7, 10), Fraction(3, 10)]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("text:a.txt", r"^data\.source has the entry 'text:a\.txt': write a weight and a source, such as"),
        ("-1 text:a.txt", "write a weight and a source"),
        ("1e3 text:a.txt", "write a weight and a source"),
        ("nan text:a.txt", "write a weight and a source"),
        ("0.5", "write a weight and a source"),
        ("0 text:a.txt", "of weight 0: give it a weight or leave it out"),
        ("1 text:/no/such/file", "there is no such file"),
        ("1 csv:a", r"data\.source is 'csv:a': use stdlib"),
    ],
)
def test_a_bad_entry_is_one_line_with_a_cure(source: str, match: str) -> None:
    with pytest.raises(SettingsError, match=match) as caught:
        check_sources(DataConfig(source=("1 stdlib", source)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["[]", "3", "[1]", str(["1 stdlib"] * 17)])
def test_what_is_no_list_of_sources_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match=r"^data\.source is .* in --set: must be a text, or a list"):
        load_settings(overrides=[f"data.source={value}"])
