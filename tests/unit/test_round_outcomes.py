"""What a round can come to for DiLoCo in one's own loop, and with what weight it takes part."""

from __future__ import annotations

import gc
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from support.scripted import PATIENCE_S, Swarm, contract_of, diloco, flat, linear, retry, train
from torch import Tensor

from opendiloco.codec import get_codec
from opendiloco.errors import OpendilocoError, SettingsError, SwarmError
from opendiloco.leave import Leave
from opendiloco.ledger import Ledger, Reading
from opendiloco.outer import params_hash
from opendiloco.report import RoundReport
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.simulated import SimulatedGroup

# --- what a round can come to --------------------------------------------------------------------------


def test_a_retry_sends_the_same_pseudo_gradient_and_loses_nothing() -> None:
    reports: list[RoundReport] = []
    model, twin, swarm = linear(), linear(), Swarm(retry(), retry("c: connection lost"))
    with diloco(model, contract_of(), swarm, on_round=reports.append) as optimizer, diloco(twin) as untroubled:
        optimizer.count_tokens(64)
        train(model, optimizer, 2)
        train(twin, untroubled, 2)
        assert len(swarm.gradients) == 3
        assert all(torch.equal(gradient, swarm.gradients[0]) for gradient in swarm.gradients)
        assert torch.equal(optimizer.outer.theta, untroubled.outer.theta)
        assert optimizer.params_hash == untroubled.params_hash
    assert [(report.round, report.outcome.verdict) for report in reports] == [(1, "retry"), (1, "retry"), (1, "commit")]
    assert [report.params_hash is None for report in reports] == [True, True, False]
    assert [report.outer_gradient_norm is None for report in reports] == [True, True, False]
    assert {(report.inner_steps, report.tokens) for report in reports} == {(2, 64)}
    norm = float(torch.linalg.vector_norm(swarm.gradients[0]))
    assert {report.pseudo_gradient_norm for report in reports} == {norm}
    assert reports[2].outer_gradient_norm == pytest.approx(norm)


def test_the_first_phase_begins_with_the_run_however_long_the_first_worker_waits() -> None:
    """In a phase of a fixed length it would have nothing left of it."""

    class Late(Swarm):
        began = math.inf

        def wait_for_start(self) -> Future[int]:
            future = Future[int]()

            def start() -> None:
                self.began = time.monotonic()
                future.set_result(2)

            threading.Timer(0.2, start).start()
            return future

    swarm = Late()
    with diloco(linear(), contract_of(), swarm) as optimizer:
        assert optimizer.phase._started >= swarm.began
        assert optimizer.phase._begun >= swarm.began


def test_too_many_retries_end_with_the_reason_and_the_cure_and_change_nothing() -> None:
    model, swarm = linear(), Swarm(*[retry()] * 4)
    with diloco(model, contract_of(max_retries=3), swarm) as optimizer:
        theta = optimizer.outer.theta.clone()
        with pytest.raises(SwarmError, match=r"round 1 failed 4 times \(b: sent nothing for 5 s\): start this worker"):
            train(model, optimizer, 2)
        assert (optimizer.round, torch.equal(optimizer.outer.theta, theta)) == (0, True)
        assert not optimizer.outer.momentum.any()
        assert len(swarm.gradients) == 4


def test_no_retries_means_one_attempt() -> None:
    model, swarm = linear(), Swarm(retry())
    with (
        diloco(model, contract_of(max_retries=0, steps=1), swarm) as optimizer,
        pytest.raises(SwarmError, match="failed 1 times"),
    ):
        train(model, optimizer, 1)


def test_a_loop_that_goes_on_after_a_failed_round_tries_again_at_its_next_step() -> None:
    """It must not train on alone for ever."""
    model, swarm = linear(), Swarm(retry())
    with diloco(model, contract_of(max_retries=0), swarm) as optimizer:
        with pytest.raises(SwarmError):
            train(model, optimizer, 2)
        train(model, optimizer, 1)
        assert optimizer.round == 1


@pytest.mark.parametrize(
    ("missed", "counted", "keeps"), [(1, False, True), (2, False, False), (1, True, False)], ids=["late", "stale", "in"]
)
def test_a_worker_that_was_left_behind_goes_where_the_swarm_is(missed: int, counted: bool, keeps: bool) -> None:
    """Its finished phase goes on top of the new parameters, unless more rounds passed than rounds.max_staleness, or
    the round that it gets from others has its pseudo-gradient already."""
    model, swarm = linear(), Swarm(RoundOutcome(verdict="resync", reason="the swarm is ahead"))
    reports: list[RoundReport] = []
    moves: list[Recovery] = []
    with diloco(model, contract_of(steps=1), swarm, on_round=reports.append, on_catch_up=moves.append) as optimizer:
        assert not moves  # how it came in is not told again
        before = flat(list(model.parameters()))
        there, theta = Position(missed, "ab" * 32, "", tokens=40), torch.randn_like(before)
        swarm.ahead, swarm.counted = (there, theta), counted
        train(model, optimizer, 1)
        assert (optimizer.round, optimizer.outer.lineage, optimizer.position.tokens) == (missed, "ab" * 32, 40)
        assert torch.equal(swarm.vectors["theta"], theta)
        work = swarm.gradients[0]
        assert torch.equal(flat(list(model.parameters())), theta - work if keeps else theta)
        assert work.abs().max() > 0
        assert [report.outcome.verdict for report in reports] == ["resync"]
        assert [move.position.lineage for move in moves] == ["ab" * 32]


@pytest.mark.parametrize(("weighting", "weight"), [("uniform", 1.0), ("tokens", 140.0)])
def test_work_that_came_too_late_counts_in_the_next_round(weighting: str, weight: float) -> None:
    """Wherever in their phase the others are by then."""
    model, swarm = linear(), Swarm(RoundOutcome(verdict="resync", reason="the swarm is ahead"))
    with diloco(model, contract_of(steps=10, weighting=weighting), swarm) as optimizer:
        for _ in range(14):
            if optimizer.phase.steps == 9:
                swarm.ahead, swarm.inner_step = (Position(1, "ab" * 32, "", tokens=40), torch.zeros(18)), 6
            optimizer.count_tokens(10)
            train(model, optimizer, 1)
        assert (optimizer.round, swarm.following) == (2, [False, False])
        assert swarm.requests[1].weight == weight


def test_leaving_while_the_state_is_being_replaced_writes_it_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Swarm):
        def catch_up(self) -> Future[Recovery]:
            if not self.gradients:
                return super().catch_up()
            self.vectors["theta"][3:] = 7.0  # some of the chunks
            asked.set()
            return Future()

    asked = threading.Event()
    model, swarm = linear(), Slow(RoundOutcome(verdict="resync", reason="the swarm is ahead"))
    with diloco(model, contract_of(steps=1), swarm, leaving=asked.is_set) as optimizer:
        with optimizer:
            assert optimizer.has_state
            train(model, optimizer, 1)
            assert (optimizer.is_done, optimizer.has_state) == (True, False)
        assert not (flat(list(model.parameters())) == 7.0).any()
    assert "it holds no outer parameters of any round" in caplog.text


@pytest.mark.parametrize("leaves", [False, True])
def test_end_of_the_network_process_is_no_error_for_a_worker_that_is_asked_to_leave(leaves: bool) -> None:
    model, swarm = linear(), Swarm(SwarmError("the network process of this peer has ended"))
    with diloco(model, contract_of(steps=1), swarm, leaving=lambda: leaves) as optimizer:
        theta = optimizer.outer.theta.clone()
        with pytest.raises(Leave if leaves else SwarmError):
            train(model, optimizer, 1)
        assert (optimizer.has_state, torch.equal(optimizer.outer.theta, theta)) == (True, True)


def test_a_round_that_nobody_could_be_told_of_is_committed_all_the_same() -> None:
    class Ended(Swarm):
        def committed(self, position: Position) -> None:
            raise SwarmError("the network process of this peer has ended")

        def set_params_hash(self, round: int, params_hash: str) -> None:
            raise SwarmError("the network process of this peer has ended")

    model, reports = linear(), list[RoundReport]()
    with diloco(model, contract_of(steps=1), Ended(), on_round=reports.append) as optimizer:
        with pytest.raises(SwarmError):
            train(model, optimizer, 1)
        assert [report.round for report in reports] == [optimizer.round] == [1]
        assert optimizer.params_hash == params_hash(optimizer.outer)


def test_a_swarm_that_comes_into_sight_late_is_caught_up_with_before_the_first_step() -> None:
    model, swarm = linear(), Swarm()
    there = Position(5, "ab" * 32, "", tokens=40), torch.ones(18)
    swarm.late_sight = there
    with diloco(model, swarm=swarm) as optimizer:
        assert (optimizer.round, optimizer.outer.lineage, optimizer.recovery.position) == (5, "ab" * 32, there[0])
        assert torch.equal(flat(list(model.parameters())), there[1])


@pytest.mark.parametrize(("at", "has_vote"), [(0, True), (1, True), (6, False)])
def test_a_worker_that_begins_where_the_swarm_stands_does_what_is_left_of_its_phase(at: int, has_vote: bool) -> None:
    model, swarm = linear(), Swarm()
    swarm.inner_step = at
    with diloco(model, contract_of(steps=10), swarm) as optimizer:
        assert (optimizer.global_step, optimizer.phase.has_vote, swarm.following) == (at, has_vote, [not has_vote])
        train(model, optimizer, 10 - at)
        assert optimizer.round == 1
        assert swarm.requests[0].weight == float(has_vote)


def test_the_end_of_the_network_process_ends_the_step_with_its_reason() -> None:
    model, swarm = linear(), Swarm(SwarmError("the network process of this peer has ended"))
    with (
        diloco(model, contract_of(steps=1), swarm) as optimizer,
        pytest.raises(SwarmError, match="network process of this peer has ended"),
    ):
        train(model, optimizer, 1)


def test_a_lone_replica_that_diverged_starts_the_round_again_from_the_outer_parameters() -> None:
    model, swarm, reports = linear(), Swarm(), list[RoundReport]()
    with diloco(model, contract_of(steps=1), swarm, on_round=reports.append) as optimizer:
        theta = optimizer.outer.theta.clone()
        with torch.no_grad():
            model.weight[0, 0] = math.nan
        optimizer.step()
        assert [report.outcome.verdict for report in reports] == ["skip", "skip"]
        assert "the pseudo-gradient is not finite" in reports[0].outcome.reason
        assert torch.equal(optimizer.outer.theta, theta)
        assert torch.equal(flat(list(model.parameters())), theta)
        assert (optimizer.round, optimizer.phase.steps, optimizer.phase.weight) == (0, 0, 1.0)
        train(model, optimizer, 1)
        assert optimizer.round == 1
        assert bool(torch.isfinite(optimizer.outer.theta).all())


@pytest.mark.parametrize("weighting", ["uniform", "tokens"])
def test_a_replica_that_diverged_has_no_part_in_the_round_and_takes_its_result(weighting: str) -> None:
    names = ["bad", "good"]
    group = SimulatedGroup(names, get_codec("none"))
    reports: dict[str, list[RoundReport]] = {name: [] for name in names}
    models = {name: linear() for name in names}

    def work(name: str) -> tuple[str, Tensor]:
        model, contract = models[name], contract_of(steps=2, weighting=weighting)
        with diloco(model, contract, group.member(name), on_round=reports[name].append) as optimizer:
            for round in range(2):
                optimizer.count_tokens(10)
                train(model, optimizer, 1, seed=round)
                if name == "bad" and round == 0:
                    with torch.no_grad():
                        model.weight[0, 0] = math.inf
                optimizer.step()
            return optimizer.params_hash, flat(list(model.parameters()))

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(work, names))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    committed = [report for report in reports["good"] if report.outcome.verdict == "commit"]
    assert [sorted(report.outcome.weights) for report in committed] == [["good"], ["bad", "good"]]
    assert [report.outcome.verdict for report in reports["bad"]] == ["skip", "commit", "commit"]


def test_a_worker_without_a_vote_trains_on_and_takes_the_round_the_moment_the_others_have_it() -> None:
    others = Future[RoundOutcome]()
    model, swarm = linear(), Swarm(others)
    with diloco(model, contract_of(steps=10), swarm) as optimizer:
        optimizer.drop_phase("the loss is nan")
        train(model, optimizer, 3)
        assert swarm.requests == [RoundRequest(weight=0.0, tokens=0)]
        assert (optimizer.round, optimizer.phase.steps) == (0, 3)
        swarm.vectors["average"].fill_(0.5)
        theirs = {"weights": {"b": 1.0}, "tokens": {"b": 7}, "readings": {"b": (Reading(shard=2, sequences=4),)}}
        others.set_result(RoundOutcome(verdict="commit", lineage="cd" * 32, **theirs))
        train(model, optimizer, 1)
        assert (optimizer.round, optimizer.phase.steps, optimizer.outer.lineage) == (1, 0, "cd" * 32)
        assert optimizer.position.ledger == Ledger().after(theirs["readings"])
        assert torch.equal(flat(list(model.parameters())), optimizer.outer.theta)
        train(model, optimizer, 10)
        assert swarm.requests[1:] == [RoundRequest(weight=1.0, tokens=10)]


def test_a_worker_without_a_vote_gets_it_back_in_mid_phase_when_nobody_is_left_to_follow() -> None:
    nobody = RoundOutcome(verdict="skip", reason="nobody is there to follow")
    model, swarm = linear(), Swarm(nobody)
    with diloco(model, contract_of(steps=4), swarm) as optimizer:
        train(model, optimizer, 1)
        optimizer.drop_phase("the loss is nan")
        train(model, optimizer, 1)
        assert (optimizer.round, optimizer.phase.steps, optimizer.phase.has_vote) == (0, 2, True)
        train(model, optimizer, 2)
        assert optimizer.round == 1
        assert [request.weight for request in swarm.requests] == [0.0, 1.0]


def test_a_replica_that_diverges_again_and_again_ends_with_the_reason_and_the_cure() -> None:
    model = linear()
    with diloco(model, contract_of(steps=1, max_retries=3)) as optimizer:
        for _ in range(3):
            optimizer.drop_phase("the loss is nan")
        with pytest.raises(OpendilocoError, match=r"the loss is nan, 4 times .*: lower inner.lr"):
            optimizer.drop_phase("the loss is nan")


def test_work_that_is_dropped_in_the_middle_of_a_phase_leaves_what_is_done_after_it() -> None:
    model, swarm = linear(), Swarm()
    with diloco(model, contract_of(steps=3, weighting="tokens"), swarm) as optimizer:
        theta = optimizer.outer.theta.clone()
        optimizer.count_tokens(10)
        train(model, optimizer, 1)
        optimizer.drop_phase("the loss is nan")
        assert swarm.following == [False, False]  # what is left counts, so the others wait for it
        assert torch.equal(flat(list(model.parameters())), theta)
        for _ in range(2):
            optimizer.count_tokens(10)
            train(model, optimizer, 1)
        assert optimizer.round == 1
    assert swarm.requests == [RoundRequest(weight=20.0, tokens=20)]


def test_a_request_to_leave_ends_the_wait_for_the_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.diloco.LEAVE_LIMIT_S", 0.1)
    asked = threading.Event()
    model, swarm = linear(), Swarm(Future[RoundOutcome]())  # an attempt that never ends
    with diloco(model, contract_of(steps=1), swarm, leaving=asked.is_set) as optimizer:
        asker = threading.Timer(0.05, asked.set)
        asker.start()
        started = time.monotonic()
        with pytest.raises(Leave):
            train(model, optimizer, 1)
        assert asked.is_set()
        assert time.monotonic() - started < PATIENCE_S
        asker.join()
        assert optimizer.round == 0


def test_a_commit_that_came_counts_even_when_leaving() -> None:
    model = linear()
    with diloco(model, contract_of(steps=1), leaving=lambda: True) as optimizer:
        train(model, optimizer, 1)
        assert optimizer.round == 1


def test_a_swarm_that_refuses_the_worker_leaves_no_thread_behind() -> None:
    before, swarm = set(threading.enumerate()), Swarm()
    swarm.refusal = "run.id is taken"
    with pytest.raises(SettingsError, match="taken"), diloco(linear(), swarm=swarm):
        pass
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


# --- weights -------------------------------------------------------------------------------------------


def test_uniform_weighting_gives_every_worker_one() -> None:
    model, swarm = linear(), Swarm()
    with diloco(model, contract_of(steps=1), swarm) as optimizer:
        optimizer.count_tokens(640)
        train(model, optimizer, 1)
    assert swarm.requests == [RoundRequest(weight=1.0, tokens=640)]


def test_weighting_by_tokens_counts_those_of_each_round_anew() -> None:
    model, swarm = linear(), Swarm()
    with diloco(model, contract_of(steps=2, weighting="tokens"), swarm) as optimizer:
        for tokens in (100, 28, 7, 5):
            optimizer.count_tokens(tokens)
            train(model, optimizer, 1)
    assert swarm.requests == [RoundRequest(weight=128.0, tokens=128), RoundRequest(weight=12.0, tokens=12)]


def test_weighting_by_tokens_without_any_names_the_setting_and_the_cure() -> None:
    model, swarm = linear(), Swarm()
    with (
        diloco(model, contract_of(steps=1, weighting="tokens"), swarm) as optimizer,
        pytest.raises(SettingsError, match=r"outer.weighting.*count_tokens"),
    ):
        train(model, optimizer, 1)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_workers_with_loops_of_their_own_stay_identical(codec: str) -> None:
    names = ["a", "b", "c"]
    group = SimulatedGroup(names, get_codec(codec))
    models = {name: linear() for name in names}

    def work(name: str) -> tuple[str, str, Tensor]:
        model = models[name]
        with diloco(model, contract_of(steps=3, codec=codec, weighting="tokens"), group.member(name)) as optimizer:
            for round in range(3):
                optimizer.count_tokens(10 * (1 + names.index(name)))
                train(model, optimizer, 3, seed=10 * round + names.index(name))
            return optimizer.params_hash, optimizer.outer.lineage, flat(list(model.parameters()))

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(work, names))
    assert len({(digest, lineage) for digest, lineage, _ in results}) == 1
    assert all(torch.equal(parameters, results[0][2]) for _, _, parameters in results)
