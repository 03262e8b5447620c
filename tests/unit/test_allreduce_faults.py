"""The butterfly all-reduce with members that fail: all commits are one right average, and nobody is stuck."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lab import (
    BAD_VALUES,
    BLOCK,
    SILENCE_S,
    Fault,
    FaultyStream,
    Frame,
    Lab,
    check_commits,
    check_time,
    die,
    die_when_all_streams_are_open,
    every_codec,
    freeze,
    one_thread,
    send_garbage,
    send_mask_of_nobody,
    send_nan,
    send_too_much,
    small_parts,
)

from opendiloco.codec import CODECS
from opendiloco.wire import FrameKind, Stream

__all__ = ["one_thread", "small_parts"]


# --- members that fail before any of their values are in the average -----------------------------------


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "trouble",
    [{"absent": "b"}, *({"faults": {"b": Fault(FrameKind.GROUP, 0, act)}} for act in (die, freeze, send_garbage))],
    ids=["absent", "dies", "freezes", "sends garbage"],
)
def test_nobody_waits_for_a_follower_nor_misses_it(trouble: dict[str, Any]) -> None:
    lab = Lab((1.0, 0.0, 3.0), (0.5, 0.0, 0.5), **trouble)
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "c"]
    check_time(lab)


@every_codec
@pytest.mark.parametrize("act", BAD_VALUES)
@pytest.mark.usefixtures("small_parts")
def test_a_member_that_sends_bad_values_is_left_out_and_the_others_commit(codec: str, act: object) -> None:
    lab = Lab((1.0, 50.0, 3.0), (0.5, 0.0, 0.5), codec, faults={"b": Fault(act=act)})  # type: ignore[arg-type]
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "c"]
    for attempt in attempts.values():
        assert attempt.weights == {"a": 1.0, "c": 3.0}
        assert attempt.failures.keys() == {"b"}
        assert attempt.failures["b"].isprintable()
    check_time(lab)


@pytest.mark.parametrize("act", BAD_VALUES)
@pytest.mark.usefixtures("small_parts")
def test_bad_values_of_a_member_that_reduces_too_make_everybody_retry(act: object) -> None:
    """It has its own values in its own slice, and nobody else has them."""
    lab = Lab((1.0, 50.0, 3.0), (0.3, 0.3, 0.4), faults={"b": Fault(act=act)})  # type: ignore[arg-type]
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab)


@pytest.mark.parametrize(("share", "committed"), [(0.0, ["a", "c"]), (0.4, [])], ids=["reduces nothing", "reduces"])
def test_a_member_that_never_comes_costs_one_silence(share: float, committed: list[str]) -> None:
    lab = Lab((1.0, 1.0, 1.0), (0.3, share, 0.7), absent="b", silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == committed
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab, SILENCE_S)


@pytest.mark.parametrize(("share", "committed"), [(0.0, ["a", "c"]), (0.4, [])], ids=["reduces nothing", "reduces"])
@pytest.mark.parametrize("kind", [FrameKind.GROUP, FrameKind.PART])
def test_a_member_that_stops_before_its_first_value_costs_one_silence(
    share: float, committed: list[str], kind: FrameKind
) -> None:
    lab = Lab((1.0, 1.0, 1.0), (0.3, share, 0.7), faults={"b": Fault(kind=kind, act=freeze)}, silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == committed
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab, SILENCE_S)


@pytest.mark.parametrize(("share", "committed"), [(0.0, ["a", "c"]), (0.4, [])], ids=["reduces nothing", "reduces"])
def test_a_member_that_dies_before_its_first_value_costs_no_wait(share: float, committed: list[str]) -> None:
    """Its streams are open (they named their group) and break before a value is sent."""
    lab = Lab((1.0, 1.0, 1.0), (0.3, share, 0.7), faults={"b": Fault(act=die_when_all_streams_are_open)})
    attempts = lab.run()
    assert check_commits(lab, attempts) == committed
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab)


# --- members that fail in the middle -------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.4], ids=["reduces nothing", "reduces"])
@pytest.mark.parametrize("act", [die_when_all_streams_are_open, *BAD_VALUES])
@pytest.mark.usefixtures("small_parts")
def test_a_member_that_fails_in_the_middle_of_its_parts_makes_everybody_retry(act: object, share: float) -> None:
    """Some parts hold its values and others do not: nobody commits such a mixture, and nobody waits."""
    lab = Lab((1.0, 5.0, 1.0), (0.3, share, 0.7), faults={"b": Fault(after=2, act=act)})  # type: ignore[arg-type]
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all("b" in attempt.failures for attempt in attempts.values())
    check_time(lab)


@pytest.mark.usefixtures("small_parts")
def test_a_member_that_stops_in_the_middle_of_its_parts_costs_one_silence() -> None:
    lab = Lab((1.0, 5.0, 1.0), (0.3, 0.0, 0.7), faults={"b": Fault(after=2, act=freeze)}, silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all(attempt.failures.keys() == {"b"} for attempt in attempts.values())
    check_time(lab, SILENCE_S)


@pytest.mark.usefixtures("small_parts")
def test_values_that_reached_only_one_reducer_make_everybody_retry() -> None:
    lab = Lab((1.0, 5.0, 1.0), (0.5, 0.0, 0.5), faults={"b": Fault(act=send_nan, towards="c")})
    assert check_commits(lab, lab.run()) == []


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("act", [die_when_all_streams_are_open, *BAD_VALUES, send_mask_of_nobody])
@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_fails_while_it_answers_makes_everybody_retry(act: object, after: int) -> None:
    fault = Fault(FrameKind.AVERAGE, after, act)  # type: ignore[arg-type]
    lab = Lab((1.0, 1.0, 1.0, 1.0), (0.2, 0.4, 0.2, 0.2), faults={"b": fault})
    assert check_commits(lab, lab.run()) == []
    check_time(lab)


@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_stops_while_it_answers_costs_one_silence() -> None:
    fault = Fault(FrameKind.AVERAGE, 2, freeze)
    lab = Lab((1.0, 1.0, 1.0), (0.3, 0.4, 0.3), faults={"b": fault}, silence_s=SILENCE_S)
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    assert all("b" in attempt.failures for attempt in attempts.values())
    check_time(lab, SILENCE_S)


async def die_when_a_and_c_are_done(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    await asyncio.gather(lab.done["a"].wait(), lab.done["c"].wait())
    return await die(lab, owner, stream, frame)


@every_codec
@pytest.mark.usefixtures("small_parts")
def test_members_that_got_all_answers_of_a_dying_reducer_commit_the_same_bytes(codec: str) -> None:
    """The others learn that the round went on, and do not commit anything else."""
    fault = Fault(FrameKind.AVERAGE, 1, die_when_a_and_c_are_done, towards="d")
    lab = Lab((1.0, 2.0, 3.0, 4.0), (0.2, 0.4, 0.2, 0.2), codec, faults={"b": fault})
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "c"]
    assert attempts["a"].weights.keys() == set("abcd")
    assert attempts["d"].failures.keys() == {"b"}
    check_time(lab)


async def answer_that_others_are_awaited(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    while True:
        await Stream.send(stream, FrameKind.WAITING)
        await asyncio.sleep(0.05)


@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_is_always_waiting_ends_at_the_limit_and_is_the_only_one_blamed() -> None:
    fault = Fault(FrameKind.AVERAGE, 0, answer_that_others_are_awaited)
    lab = Lab((1.0, 1.0, 1.0), (0.3, 0.4, 0.3), faults={"b": fault}, limit_s=1.0)
    attempts = lab.run()
    assert check_commits(lab, attempts) == []
    check_time(lab, lab.limit_s)
    assert [attempt.failures.keys() for attempt in attempts.values()] == [{"b"}, {"b"}]


async def take_time(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
    """Alive and never silent for long, but slower with its first values than the silence limit."""
    await asyncio.sleep(lab.silence_s * (0.5 if frame[0] == FrameKind.GROUP else 0.85))
    return frame


@pytest.mark.parametrize("silence_s", [0.4, 0.8])
@pytest.mark.usefixtures("small_parts")
def test_a_reducer_that_waits_for_a_slow_member_is_not_taken_for_dead(silence_s: float) -> None:
    """However short the silence limit is, a reducer says often enough that it is alive."""
    slow = Fault(kind=None, act=take_time)
    lab = Lab((1.0, 1.0, 1.0), (0.5, 0.0, 0.5), numel=2 * BLOCK, faults={"b": slow}, silence_s=silence_s)
    attempts = lab.run()
    assert not any(attempt.failures for attempt in attempts.values())
    assert check_commits(lab, attempts) == ["a", "c"]


# --- everything at once --------------------------------------------------------------------------------

faults = st.builds(
    Fault,
    kind=st.sampled_from([FrameKind.PART, FrameKind.AVERAGE]),
    after=st.integers(0, 5),
    act=st.sampled_from([die_when_all_streams_are_open, *BAD_VALUES]),
    towards=st.sampled_from(["", "a"]),
)


@given(
    st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=5),
    st.dictionaries(st.sampled_from("bcde"), faults, min_size=1, max_size=2),
    st.sampled_from(list(CODECS)),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.usefixtures("small_parts")
def test_whatever_goes_wrong_all_commits_are_one_right_average(
    shares: list[float], faults: dict[str, Fault], codec: str
) -> None:
    """Faults are seen at once here: connections break, or what comes is wrong."""
    shares[0] = 0.5
    present = {peer: fault for peer, fault in faults.items() if peer in "abcde"[: len(shares)]}
    lab = Lab([1.0 + index for index in range(len(shares))], shares, codec, faults=present)
    check_commits(lab, lab.run())
    check_time(lab)


@pytest.mark.parametrize(
    "act", [die_when_all_streams_are_open, send_nan, send_too_much], ids=["dies", "not finite", "too much"]
)
@pytest.mark.usefixtures("small_parts")
def test_hundreds_of_failing_attempts_leave_memory_threads_and_handles_as_they_were(
    act: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("allreduce", "wire"):
        monkeypatch.setattr(f"opendiloco.{module}.LINGER_S", 0.01)
    process = psutil.Process()

    def fail(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            Lab((1.0, 5.0, 1.0), (0.3, 0.4, 0.3), faults={"b": Fault(after=2, act=act)}).run()  # type: ignore[arg-type]
        gc.collect()
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    before = fail(30)
    after = fail(150)
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 20e6
