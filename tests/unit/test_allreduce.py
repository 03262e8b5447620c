"""The butterfly all-reduce without faults, and attempts that are over: exact, identical, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lab import (
    Fault,
    FaultyStream,
    Frame,
    Lab,
    check_commits,
    every_codec,
    one_thread,
    small_parts,
)

from opendiloco.codec import CODECS
from opendiloco.wire import FrameKind, WireError

__all__ = ["one_thread", "small_parts"]


# --- without faults ------------------------------------------------------------------------------------


@every_codec
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 2**20 + 1])
@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((3.0,), (1.0,)),
        ((1.0, 1.0), (0.5, 0.5)),
        ((1.0, 700.0), (0.0, 1.0)),
        ((0.25, 4096.0, 17.0), (0.2, 0.0, 0.8)),
        ((1.0,) * 5, (0.0, 0.3, 0.3, 0.0, 0.4)),
        ((0.0, 1.0), (0.0, 1.0)),
        ((2.0, 0.0, 1.0, 0.0), (0.4, 0.0, 0.6, 0.0)),
    ],
    ids=["1", "2", "2-one-reduces", "3-uneven", "5-some-reduce", "1-and-a-follower", "2-and-2-followers"],
)
def test_replicas_are_identical_and_the_average_is_right(
    codec: str, numel: int, weights: Sequence[float], shares: Sequence[float]
) -> None:
    lab = Lab(weights, shares, codec, numel)
    before = {peer: values.clone() for peer, values in lab.values.items()}
    attempts = lab.run()
    assert check_commits(lab, attempts) == list(lab.group.peers)
    assert all(set(attempt.weights) == lab.group.voters for attempt in attempts.values())
    assert not any(attempt.failures for attempt in attempts.values())
    assert all(torch.equal(lab.values[peer], before[peer]) for peer in before)


@pytest.mark.parametrize(("codec", "numel"), [("none", 2**17 + 1), ("fp16", 2**17 + 1), ("int8", 2**20 + 1)])
def test_eight_members_agree_on_many_parts(codec: str, numel: int) -> None:
    lab = Lab([1.0 + index for index in range(8)], [index / 28 for index in range(8)], codec, numel)
    assert check_commits(lab, lab.run()) == list("abcdefgh")


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e9), st.sampled_from([0.0, 0.1, 1.0])) | st.just((0.0, 0.0)),
        min_size=1,
        max_size=8,
    ).filter(lambda members: members[-1][0]),
    st.integers(0, 9000),
    st.sampled_from(list(CODECS)),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.usefixtures("small_parts")
def test_any_weights_shares_and_sizes_come_to_one_right_average(
    members: list[tuple[float, float]], numel: int, codec: str
) -> None:
    shares = [share for _, share in members]
    shares[-1] = shares[-1] or 1.0
    lab = Lab([weight for weight, _ in members], shares, codec, numel)
    assert check_commits(lab, lab.run()) == list(lab.group.peers)


def test_a_follower_takes_the_average_for_the_bytes_of_one_vector_and_sends_nothing() -> None:
    lab = Lab((1.0, 0.0, 3.0), (0.5, 0.0, 0.5), numel=2**17)
    attempts = lab.run()
    assert check_commits(lab, attempts) == ["a", "b", "c"]
    assert attempts["b"].received_bytes == pytest.approx(4 * lab.numel, rel=0.01)
    assert attempts["b"].sent_bytes < 1000
    assert attempts["b"].bandwidth is None


@pytest.mark.usefixtures("small_parts")
def test_voters_have_their_averages_before_followers_get_any() -> None:
    """A voter that takes its time to confirm its last average keeps the follower waiting, and nobody else."""
    seen: list[int] = []

    async def look_at_the_follower(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
        await asyncio.sleep(0.2)
        seen.append(len(lab.members["b"]._results))
        return frame

    lab = Lab((1.0, 0.0, 3.0), (1.0, 0.0, 0.0), faults={"c": Fault(FrameKind.RECEIVED, 11, look_at_the_follower)})
    assert check_commits(lab, lab.run()) == ["a", "b"]
    assert seen == [0]


def test_memory_of_an_all_reduce_that_is_over_does_not_wait_for_the_collector() -> None:
    """Vectors of the size of the model would pile up, one or two for each round."""
    lab = Lab((1.0, 2.0, 0.0), (0.5, 0.5, 0.0))
    gc.collect()
    gc.disable()
    try:
        lab.run()
        members = [weakref.ref(member) for member in lab.members.values()]
        reducers = [weakref.ref(member._reducer) for member in lab.members.values()]
        lab.members.clear()
        lab._runs.clear()
        lab._serving.clear()
        assert not any(reference() for reference in (*members, *reducers))
    finally:
        gc.enable()


@pytest.mark.usefixtures("small_parts")
def test_every_byte_sent_is_a_byte_received() -> None:
    attempts = Lab((1.0, 2.0, 3.0), (0.5, 0.2, 0.3), "int8").run().values()
    assert sum(attempt.sent_bytes for attempt in attempts) == sum(attempt.received_bytes for attempt in attempts) > 0


@pytest.mark.usefixtures("small_parts")
def test_bandwidth_is_measured_once_it_is_more_than_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = partial(Lab, (1.0, 2.0, 3.0), (0.5, 0.2, 0.3), "int8")
    assert [attempt.bandwidth for attempt in lab().run().values()] == [None, None, None]
    monkeypatch.setattr("opendiloco.allreduce.MIN_MEASURED_BYTES", 1)
    assert all(attempt.bandwidth is not None and attempt.bandwidth > 0 for attempt in lab().run().values())


def test_a_lone_member_sends_nothing_and_gets_its_own_values_through_the_codec() -> None:
    lab = Lab((2.0,), (1.0,), "fp16")
    attempt = lab.run()["a"]
    assert (attempt.sent_bytes, attempt.received_bytes, attempt.bandwidth) == (0, 0, None)
    assert torch.equal(lab.averages["a"], lab.values["a"].half().float())


@every_codec
def test_the_digest_tells_different_averages_apart(codec: str) -> None:
    digests = {Lab(weights, (0.5, 0.5), codec).run()["a"].digest for weights in ((1.0, 1.0), (1.0, 2.0))}
    assert len(digests) == 2


# --- an attempt that is over, and one that should not have begun ---------------------------------------


@pytest.mark.usefixtures("small_parts")
def test_nothing_is_written_to_the_average_once_the_attempt_is_over() -> None:
    """The next attempt writes there: values that come late must not."""
    release: list[asyncio.Event] = []

    async def wait(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
        await release[0].wait()
        return frame

    async def look(lab: Lab) -> None:
        before = lab.averages["a"].clone()
        release[0].set()
        await lab.served("a")
        assert torch.equal(lab.averages["a"], before)

    async def reduce() -> None:
        release.append(asyncio.Event())
        await lab.reduce()

    late = {"b": Fault(act=wait)}
    lab = Lab((1.0, 1.0, 1.0), (0.5, 0.0, 0.5), faults=late, limit_s=0.3, longer_limit="b", afterwards=look)
    asyncio.run(reduce())
    assert check_commits(lab, lab.attempts) == []


@pytest.mark.usefixtures("small_parts")
def test_a_second_stream_of_one_member_is_refused_and_changes_nothing() -> None:
    refusals = []

    async def open_another(lab: Lab, owner: str, stream: FaultyStream, frame: Frame) -> Frame:
        if not refusals:
            refusals.append("")
            another = await lab.connect("b", "a")
            await another.send(FrameKind.GROUP, lab.group.id)
            with pytest.raises(WireError) as caught:
                await another.receive({FrameKind.AVERAGE: 1})
            refusals.append(str(caught.value))
        return frame

    lab = Lab((1.0, 1.0, 1.0), (1.0, 0.0, 0.0), faults={"b": Fault(act=open_another)})
    assert check_commits(lab, lab.run()) == ["a", "c"]
    assert refusals[1].startswith("refused: a second stream")
