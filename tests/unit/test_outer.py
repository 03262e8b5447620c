"""The outer step follows torch's optimizers, bit for bit alike however it is cut up, and hashes prove it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opendiloco.config import OuterConfig
from opendiloco.ledger import Reading
from opendiloco.outer import OuterState, genesis_lineage, next_lineage, outer_step, params_hash

OPTIMIZERS = ("nesterov", "sgd", "sgdm", "adam")
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def config_of(optimizer: str, **values: float) -> OuterConfig:
    return OuterConfig.model_validate({"optimizer": optimizer, **values})


def state_of(optimizer: str, numel: int = 1000, *, seed: int = 0) -> OuterState:
    theta = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return OuterState.start(theta, config_of(optimizer), contract_digest="c0")


def averages(count: int, numel: int = 1000) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(numel, generator=generator) * 10.0**-k for k in range(count)]


def bits(state: OuterState) -> list[bytes]:
    return [t.numpy().tobytes() for t in (state.theta, state.momentum, state.second_moment)]


def torch_optimizer(parameter: Tensor, config: OuterConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adam":
        betas = (config.momentum, config.beta2)
        return torch.optim.Adam([parameter], lr=config.lr, betas=betas, eps=config.eps, foreach=False)
    momentum = 0.0 if config.optimizer == "sgd" else config.momentum
    nesterov = config.optimizer == "nesterov"
    return torch.optim.SGD([parameter], lr=config.lr, momentum=momentum, nesterov=nesterov, foreach=False)


@every_optimizer
def test_steps_follow_torchs_own_optimizer_within_fp32_rounding(optimizer: str) -> None:
    config, state = config_of(optimizer), state_of(optimizer)
    parameter = torch.nn.Parameter(state.theta.clone())
    reference = torch_optimizer(parameter, config)
    for count, average in enumerate(averages(6), start=1):
        before = average.clone()
        parameter.grad = average.clone()
        reference.step()
        outer_step(state, average, config)
        torch.testing.assert_close(state.theta, parameter.detach(), rtol=1e-5, atol=2e-6)
        assert torch.equal(average, before)
        assert state.round == count


def numpy_step(
    state: dict[str, npt.NDArray[np.float32]], g: npt.NDArray[np.float32], config: OuterConfig, step: int
) -> None:
    """The same formulas in numpy, whose fp32 operations are single IEEE ones."""
    f = np.float32
    lr, mu, b2, m, v = f(config.lr), f(config.momentum), f(config.beta2), state["m"], state["v"]
    if config.optimizer == "sgd":
        state["theta"] = state["theta"] - lr * g
    elif config.optimizer == "adam":
        state["m"] = m = mu * m + f(1 - config.momentum) * g
        state["v"] = v = b2 * v + f(1 - config.beta2) * (g * g)
        first = second = 1.0
        for _ in range(step):
            first, second = first * config.momentum, second * config.beta2
        root = np.sqrt(v * f(1 / (1 - second))) + f(config.eps)
        state["theta"] = state["theta"] - (m / root) * f(config.lr / (1 - first))
    else:
        state["m"] = m = mu * m + g
        state["theta"] = state["theta"] - ((mu * m + g) * lr if config.optimizer == "nesterov" else m * lr)


@every_optimizer
def test_every_operation_is_rounded_to_fp32_by_itself(optimizer: str) -> None:
    config, state = config_of(optimizer), state_of(optimizer, 50_000)
    zeros = np.zeros(50_000, np.float32)
    expected = {"theta": state.theta.numpy().copy(), "m": zeros, "v": zeros}
    for step, average in enumerate(averages(4, 50_000), start=1):
        outer_step(state, average, config)
        numpy_step(expected, average.numpy(), config, step)
        assert np.array_equal(state.theta.numpy(), expected["theta"])
        assert np.array_equal(state.momentum.numpy(), expected["m"])


@pytest.mark.parametrize("first", [0x3F800000, 0x40000000], ids=["even exponent", "odd exponent"])
def test_adams_square_root_is_correctly_rounded(first: int) -> None:
    radicands = np.arange(first, first + (1 << 23), 16, dtype=np.uint32).view(np.float32)
    second_moment = torch.from_numpy(radicands)
    state = OuterState(torch.zeros_like(second_moment), torch.ones_like(second_moment), second_moment.clone())
    # With both decays 1/2 and no gradient the corrected moments are exactly m = 1 and v = radicand.
    config = config_of("adam", lr=1.0, momentum=0.5, beta2=0.5, eps=1e-30)
    outer_step(state, torch.zeros_like(state.theta), config)
    root = np.sqrt(radicands.astype(np.float64)).astype(np.float32)
    assert np.array_equal(state.theta.numpy(), -(np.float32(0.5) / root * np.float32(2)))


@every_optimizer
@pytest.mark.parametrize("chunk_numel", [1, 7, 1003, 1004, 4096])
def test_bits_do_not_depend_on_the_chunk_size(optimizer: str, chunk_numel: int) -> None:
    whole, cut = state_of(optimizer, 2007), state_of(optimizer, 2007)
    for average in averages(3, 2007):
        outer_step(whole, average, config_of(optimizer))
        outer_step(cut, average, config_of(optimizer), chunk_numel=chunk_numel)
    assert bits(cut) == bits(whole)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@every_optimizer
@pytest.mark.usefixtures("restored_threads")
def test_bits_and_hash_do_not_depend_on_the_thread_count(optimizer: str) -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        state = state_of(optimizer, 300_001)
        for average in averages(3, 300_001):
            outer_step(state, average, config_of(optimizer), chunk_numel=1 << 20)
        results.append((bits(state), params_hash(state)))
    assert results[1:] == results[:1] * 2


@every_optimizer
def test_a_slice_brought_forward_on_its_own_equals_that_slice_of_the_whole(optimizer: str) -> None:
    whole, other = state_of(optimizer), state_of(optimizer)
    cut = slice(333, 777)
    part = OuterState(other.theta[cut], other.momentum[cut], other.second_moment[cut])
    for average in averages(3):
        outer_step(whole, average, config_of(optimizer))
        outer_step(part, average[cut], config_of(optimizer))
    for name in ("theta", "momentum", "second_moment"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[cut])
    assert torch.equal(other.theta[:333], state_of(optimizer).theta[:333])


def test_state_uses_the_tensors_it_is_given() -> None:
    theta, momentum = torch.ones(5), torch.zeros(5)
    state = OuterState(theta, momentum)
    outer_step(state, torch.ones(5), config_of("nesterov", lr=0.5, momentum=0.5))
    assert state.theta is theta
    assert theta.tolist() == [0.25] * 5  # 1 - 0.5 * (1 + 0.5 * 1)
    assert momentum.tolist() == [1.0] * 5


@pytest.mark.parametrize("numel", [0, 1])
@every_optimizer
def test_smallest_states_are_stepped_and_hashed(optimizer: str, numel: int) -> None:
    state = state_of(optimizer, numel)
    outer_step(state, torch.ones(numel), config_of(optimizer))
    assert state.round == 1
    assert len(bytes.fromhex(params_hash(state))) == 32


@pytest.mark.parametrize(
    ("average", "match"),
    [
        (torch.zeros(999), "average has 999 values"),
        (torch.zeros(1000, dtype=torch.float64), "average is torch.float64"),
        (torch.zeros(2000)[::2], "average is .* contiguous"),
        (torch.zeros(1000, device="meta"), "on meta"),
    ],
)
def test_averages_that_do_not_fit_are_refused_before_anything_changes(average: Tensor, match: str) -> None:
    state, before = state_of("nesterov"), bits(state_of("nesterov"))
    with pytest.raises(ValueError, match=match):
        outer_step(state, average, config_of("nesterov"))
    assert bits(state) == before
    assert state.round == 0


def test_adam_without_second_moment_and_uneven_states_are_refused() -> None:
    with pytest.raises(ValueError, match="no second moment"):
        outer_step(state_of("nesterov"), torch.zeros(1000), config_of("adam"))
    with pytest.raises(ValueError, match="momentum has 4 values"):
        OuterState(torch.zeros(5), torch.zeros(4))
    with pytest.raises(ValueError, match="second_moment has 4 values"):
        OuterState(torch.zeros(5), torch.zeros(5), torch.zeros(4))
    with pytest.raises(ValueError, match="chunk_numel is 0"):
        outer_step(state_of("sgd"), torch.zeros(1000), config_of("sgd"), chunk_numel=0)


@every_optimizer
def test_params_hash_is_blake3_over_the_flat_bytes_in_order(optimizer: str) -> None:
    state = state_of(optimizer)
    outer_step(state, averages(1)[0], config_of(optimizer))
    assert params_hash(state) == blake3(b"".join(bits(state))).hexdigest()


@pytest.mark.parametrize("name", ["theta", "momentum", "second_moment"])
@pytest.mark.parametrize("position", [0, 999])
def test_params_hash_sees_one_unit_in_the_last_place(name: str, position: int) -> None:
    state = state_of("adam")
    before = params_hash(state)
    values = getattr(state, name)
    values[position] = torch.nextafter(values[position], torch.tensor(10.0))
    assert params_hash(state) != before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_hashing_works_in_a_process_forked_after_hashing() -> None:
    state = state_of("nesterov", 1_000_000)
    before = params_hash(state)
    child = os.fork()
    if child == 0:  # no assertion, no exception and no exit handler may escape into the forked test run
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(0 if params_hash(state) == before else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_lineage_starts_from_contract_and_parameters() -> None:
    state = state_of("nesterov")
    assert state.lineage == genesis_lineage("c0", params_hash(state))
    starts = {genesis_lineage(*pair) for pair in (("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a", "bb"))}
    assert len(starts) == 5


ROUND = {
    "lineage": "ab",
    "round": 3,
    "weights": {"p": 1.0, "q": 2.0},
    "average_digest": "cd",
    "tokens": {"p": 5, "q": 7},
    "readings": {"p": (Reading(shard=1),), "q": ()},
}


def lineage_of(changes: dict[str, Any]) -> str:
    return next_lineage(**{**ROUND, **changes})


def test_lineage_depends_on_everything_that_was_committed() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"lineage": "ac"},
        {"round": 4},
        {"average_digest": "ce"},
        {"weights": {"p": 1.0}, "tokens": {"p": 5}, "readings": {"p": (Reading(shard=1),)}},
        {"readings": {"p": (), "q": (Reading(shard=1),)}},
        {"readings": {"p": (Reading(shard=1, done=True),), "q": ()}},
        {"readings": {"p": (Reading(shard=1), Reading(shard=1)), "q": ()}},
        *({"readings": {"p": (Reading(shard=1, **{name: 1}),), "q": ()}} for name in ("files", "rows", "sequences")),
        {"tokens": {"p": 5, "q": 8}},
        {"tokens": {"p": 7, "q": 5}},
        {"weights": {"p": 2.0, "q": 1.0}},
        {"weights": {"p": 1.0, "q": np.nextafter(2.0, 3.0)}},
        {
            "weights": {"p": 1.0, "r": 2.0},
            "tokens": {"p": 5, "r": 7},
            "readings": {"p": (Reading(shard=1),), "r": ()},
        },
        {"lineage": "a", "average_digest": "bcd"},
        {"lineage": "abcd", "average_digest": ""},
    ]
    lineages = {lineage_of(change) for change in changes}
    assert len(lineages) == len(changes)
    assert all(len(bytes.fromhex(lineage)) == 32 for lineage in lineages)


def test_lineage_does_not_depend_on_the_order_of_participants_or_the_type_of_equal_weights() -> None:
    assert lineage_of({"weights": {"q": 2, "p": 1}}) == lineage_of({})


names = st.text(st.sampled_from("ab"), max_size=3)
weights = st.dictionaries(names, st.sampled_from([1.0, 2.0]), min_size=1, max_size=3)
rounds = st.fixed_dictionaries(
    {
        "lineage": names,
        "round": st.integers(1, 2),
        "weights": weights,
        "average_digest": names,
        "count": st.integers(0, 1),
    }
).map(
    lambda values: {
        **values,
        "tokens": dict.fromkeys(values["weights"], values["count"]),
        "readings": dict.fromkeys(values["weights"], (Reading(shard=0),) * values["count"]),
    }
)


@settings(max_examples=200, deadline=None)
@given(first=rounds, second=rounds)
def test_two_rounds_have_one_lineage_exactly_when_they_are_the_same(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    del first["count"], second["count"]
    assert (lineage_of(first) == lineage_of(second)) == (first == second)


@pytest.mark.parametrize("others", [{}, {"p": 1}, {"p": 1, "q": 1, "r": 1}])
def test_lineage_refuses_tokens_and_readings_of_other_peers_than_the_participants(others: dict[str, int]) -> None:
    for changes in ({"tokens": others}, {"readings": dict.fromkeys(others, ())}):
        with pytest.raises(ValueError, match="not of the same peers"):
            lineage_of(changes)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_lineage_refuses_weights_that_cannot_have_been_averaged(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of q"):
        lineage_of({"weights": {"p": 1.0, "q": weight}})


def test_lineage_refuses_rounds_without_participants_and_before_the_first() -> None:
    with pytest.raises(ValueError, match="no participants"):
        lineage_of({"weights": {}})
    with pytest.raises(ValueError, match="round is 0"):
        lineage_of({"round": 0})


def test_lineage_format_does_not_change() -> None:
    assert lineage_of({}) == "cab0397130119b6cd18c8c4a4448a0ff7b4befab10b8e22d782a447b2cf73227"
