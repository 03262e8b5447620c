"""Which of two workers gives way, and that a stranger's record stops nobody who has others' rounds on its side."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendiloco.agreement import Agreement, state_hashes, usual_hash
from opendiloco.claims import Progress
from opendiloco.errors import SettingsError

OTHER = "f" * 64


def progress(**changes: Any) -> Progress:
    values = {
        "session": "0" * 16,
        "started": 2.0,
        "issued": 3.0,
        "contract": "a" * 64,
        "layout": "b" * 64,
        "round": 0,
        "lineage": "c" * 64,
        "params_hash": "d" * 64,
        "hashed_round": 0,
        "committed_tokens": 0,
        "state": "training",
        "steps": 0,
        "tokens_per_s": 0.0,
        "expected_finish": 9.0,
        "client_mode": False,
        "shards": [],
    }
    return Progress.model_validate(values | changes)


COMMITTED: dict[str, Any] = {"round": 3, "hashed_round": 3, "committed_tokens": 30}
STRANGE = [{"contract": OTHER}, {"layout": OTHER}, {"params_hash": OTHER}]


def agreement(**view: Progress) -> Agreement:
    """Of worker "a" of run "run", which sees `view`."""
    identity = SimpleNamespace(peer_id="a", path="key")
    return Agreement("run", cast(Any, SimpleNamespace(view=view, identity=identity, own=None)))


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        ({"contract": OTHER}, "run.id run is taken: peer b runs it with another contract"),
        ({"layout": OTHER}, r"use the same files in model.name and model.start, and the same version"),
        ({"params_hash": OTHER}, r"use the same files in model.name and model.start, and the same version"),
    ],
)
def test_before_its_first_commit_the_worker_that_started_later_gives_way(difference: dict[str, Any], line: str) -> None:
    earlier, later = progress(started=1.0, **difference), progress(started=5.0, **difference)
    with pytest.raises(SettingsError, match=line):
        agreement(b=earlier).check(progress(), has_committed=False)
    agreement(b=later).check(progress(), has_committed=False)
    agreement(b=progress(started=1.0)).check(progress(), has_committed=False)


@pytest.mark.parametrize("difference", STRANGE, ids=str)
def test_a_record_that_claims_to_be_first_stops_no_worker_that_has_committed(
    difference: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    one = agreement(stranger=progress(started=0.0, **difference))
    for _ in range(3):
        one.check(progress(), has_committed=True)
    (line,) = caplog.messages
    assert line.startswith("peer stranger is ignored: its ")


@pytest.mark.parametrize("difference", STRANGE[:2], ids=str)
def test_a_joiner_stays_with_most_of_those_that_stand_on_committed_rounds(difference: dict[str, Any]) -> None:
    honest = {peer: progress(started=1.0, **COMMITTED) for peer in "bc"}
    stranger = progress(started=0.0, **COMMITTED | difference)
    agreement(stranger=stranger, **honest).check(progress(), has_committed=False)
    with pytest.raises(SettingsError):
        agreement(b=honest["b"], stranger=stranger).check(progress(), has_committed=False)  # who is to tell
    with pytest.raises(SettingsError):
        agreement(**honest).check(progress(**difference), has_committed=False)


def test_initial_parameters_that_a_stranger_claims_stop_no_joiner_of_a_run_that_is_under_way() -> None:
    stranger = progress(started=0.0, params_hash=OTHER)
    agreement(b=progress(**COMMITTED), stranger=stranger).check(progress(), has_committed=False)


# --- the hash of the outer state -----------------------------------------------------------------------


def test_the_hash_that_most_announce_counts_whatever_comes_first() -> None:
    here = progress(**COMMITTED)
    wrong, late = progress(**COMMITTED | {"params_hash": OTHER}), progress(**COMMITTED | {"hashed_round": 2})
    elsewhere = progress(**COMMITTED | {"lineage": OTHER})
    found = state_hashes({"w": wrong, "b": here, "late": late, "e": elsewhere, "c": here}, here)
    assert found == {"w": OTHER, "b": "d" * 64, "c": "d" * 64}
    assert usual_hash(found.values()) == "d" * 64
    assert usual_hash(["1", "2"]) == usual_hash(["2", "1"])
    assert usual_hash([]) is None


def test_whoever_has_another_state_than_most_says_so_once_with_both_hashes_and_the_cure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others, own = {peer: progress(**COMMITTED) for peer in "bc"}, progress(**COMMITTED | {"params_hash": OTHER})
    one = agreement(**others)
    for _ in range(2):
        one.compare_states(own)
    (line,) = caplog.messages
    assert "after round 3" in line
    assert f"its hash is {OTHER[:12]} (1 of 3 workers), theirs {'d' * 12} (2): start this worker again with" in line
    assert caplog.records[0].levelno == logging.WARNING


def test_the_majority_says_nothing_and_of_two_that_differ_both_do(caplog: pytest.LogCaptureFixture) -> None:
    own, wrong = progress(**COMMITTED), progress(**COMMITTED | {"params_hash": OTHER})
    agreement(b=own, c=wrong).compare_states(own)
    agreement(b=own).compare_states(own)
    agreement(b=wrong).compare_states(progress(**COMMITTED | {"hashed_round": 2}))  # not hashed yet
    assert not caplog.messages
    agreement(b=wrong).compare_states(own)
    agreement(b=own).compare_states(wrong)
    assert ["one of them is wrong" in line for line in caplog.messages] == [True, True]
