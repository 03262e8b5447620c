"""DiLoCo as an optimizer in one's own loop: what it moves, what it leaves alone, and what a round can come to."""

from __future__ import annotations

import copy
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opendiloco.averager import Averager, contribution_bytes
from opendiloco.codec import get_codec
from opendiloco.config import Contract
from opendiloco.diloco import DiLoCo
from opendiloco.errors import OpendilocoError, SettingsError, SwarmError
from opendiloco.leave import Leave
from opendiloco.ledger import Ledger, Reading
from opendiloco.outer import genesis_lineage, next_lineage, params_hash
from opendiloco.phase import PhaseReport
from opendiloco.report import RoundReport
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.simulate import SimulatedGroup

PATIENCE_S = 20.0


def contract_of(*, steps: int = 2, max_retries: int = 3, **outer: object) -> Contract:
    return Contract.model_validate(
        {
            "run": {"id": "own-loop"},
            "inner": {"steps": steps},
            "outer": {"codec": "none", **outer},
            "rounds": {"max_retries": max_retries},
        }
    )


class Swarm:
    """An Averager: a group of one, in which attempts can come to something else first - to `script`, in order."""

    peer_id = "a"

    def __init__(self, *script: RoundOutcome | Exception | Future[RoundOutcome]) -> None:
        self._member = SimulatedGroup(["a"], get_codec("none")).member("a")
        self.script = list(script)
        self.gradients: list[Tensor] = []
        self.requests: list[RoundRequest] = []
        self.reports: list[PhaseReport] = []
        self.entered: list[Position] = []
        self.positions: list[Position] = []
        self.hashes: dict[int, str] = {}
        self.refusal = ""
        self.ahead: tuple[Position, Tensor] | None = None
        self.counted = False
        self.late_sight: tuple[Position, Tensor] | None = None

    @property
    def vectors(self) -> dict[str, Tensor]:
        return self._member.vectors

    def leaving(self) -> bool:
        return False

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        return self._member.allocate(sizes)

    def enter(self, contract: Contract, layout: str, position: Position) -> None:
        if self.refusal:
            raise SettingsError(self.refusal)
        self.entered.append(position)
        self._member.enter(contract, layout, position)

    def catch_up(self) -> Future[Recovery]:
        if self.ahead is None:
            return self._member.catch_up()
        position, theta = self.ahead
        self.vectors["theta"].copy_(theta)
        self._member.committed(position)
        recovery = Future[Recovery]()
        recovery.set_result(replace(self._member.catch_up().result(), has_own_work=self.counted))
        return recovery

    def begin_phase(self, *, following: bool) -> None:
        pass

    def wait_for_start(self) -> Future[int]:
        if self.late_sight is not None:
            self.ahead, self.late_sight = self.late_sight, None
            future = Future[int]()
            future.set_result(0)
            return future
        return self._member.wait_for_start()

    def withdraw(self) -> None:
        self.withdrawn = True

    def lease(self, at: Reading | None, source: int, shards: int) -> Reading:
        return self._member.lease(at, source, shards)

    def sent(self) -> Tensor:
        """The pseudo-gradient as the others get it."""
        received = torch.empty_like(self.vectors["average"])
        get_codec("none").decode(contribution_bytes(self.vectors, get_codec("none")), received)
        return received

    def average(self, request: RoundRequest) -> Future[RoundOutcome]:
        self.gradients.append(self.sent())
        self.requests.append(request)
        if not self.script:
            return self._member.average(request)
        scripted, future = self.script.pop(0), Future[RoundOutcome]()
        if isinstance(scripted, Future):
            return scripted
        if isinstance(scripted, Exception):
            future.set_exception(scripted)
        else:
            self.vectors["average"].fill_(math.nan)  # a failed attempt may leave anything there
            future.set_result(scripted)
        return future

    def awaited(self) -> str:
        return "nobody"

    def report(self, report: PhaseReport) -> None:
        self.reports.append(report)

    def committed(self, position: Position) -> None:
        self._member.committed(position)
        self.positions.append(position)

    def set_params_hash(self, round: int, params_hash: str) -> None:
        self.hashes[round] = params_hash


@contextmanager
def diloco(
    model: nn.Module,
    contract: Contract | None = None,
    swarm: Averager | None = None,
    *,
    inner: torch.optim.Optimizer | None = None,
    on_round: Callable[[RoundReport], None] = lambda report: None,
    leaving: Callable[[], bool] = lambda: False,
) -> Iterator[DiLoCo]:
    inner = inner or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = DiLoCo(inner, model, swarm or Swarm(), contract or contract_of(), on_round=on_round, leaving=leaving)
    try:
        yield optimizer
    finally:
        optimizer.finish()


def linear(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(5, 3, dtype=dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, seed: int = 1) -> None:
    """Steps of somebody's own loop."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(4, 5, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()


def flat(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters])


def retry(reason: str = "b: sent nothing for 5 s") -> RoundOutcome:
    return RoundOutcome(verdict="retry", reason=reason)


# --- the outer step in one's own loop ------------------------------------------------------------------


def test_every_hth_step_is_an_outer_step_of_nesterov_momentum() -> None:
    model, twin = linear(), linear()
    theta = [parameter.detach().clone() for parameter in twin.parameters()]
    outer = torch.optim.SGD(theta, lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.SGD(twin.parameters(), lr=0.1)
    with diloco(model, contract_of(steps=3)) as optimizer:
        for round in range(1, 4):
            train(model, optimizer, 3, seed=round)
            train(twin, inner, 3, seed=round)
            for anchor, parameter in zip(theta, twin.parameters(), strict=True):
                anchor.grad = anchor - parameter.detach()
            outer.step()
            for anchor, parameter in zip(theta, twin.parameters(), strict=True):
                parameter.data.copy_(anchor)
            assert (optimizer.round, optimizer.phase.steps) == (round, 0)
            torch.testing.assert_close(flat(list(model.parameters())), flat(theta), rtol=1e-5, atol=1e-6)
            assert torch.equal(flat(list(model.parameters())), optimizer.outer.theta)


def test_between_rounds_only_the_inner_optimizer_moves_the_model() -> None:
    model, twin = linear(), linear()
    with diloco(model, contract_of(steps=4)) as optimizer:
        theta = optimizer.outer.theta.clone()
        train(model, optimizer, 3)
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 3)
        assert torch.equal(flat(list(model.parameters())), flat(list(twin.parameters())))
        assert torch.equal(optimizer.outer.theta, theta)
        assert (optimizer.round, optimizer.phase.steps) == (0, 3)
        optimizer.write_outer_parameters()
        assert torch.equal(flat(list(model.parameters())), theta)


def test_the_inner_optimizers_moments_live_on_over_rounds() -> None:
    model = linear()
    with diloco(model, contract_of(steps=2), inner=torch.optim.AdamW(model.parameters())) as optimizer:
        train(model, optimizer, 6)
        assert [state["step"].item() for state in optimizer.state.values()] == [6.0, 6.0]


def test_the_swarm_is_told_how_far_the_phase_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.phase.REPORT_S", 0.0)
    model, swarm = linear(), Swarm()
    with diloco(model, contract_of(steps=4), swarm) as optimizer:
        train(model, optimizer, 6)
    assert [report.steps for report in swarm.reports] == [1, 2, 3, 1, 2]


def test_the_inner_step_may_take_a_closure() -> None:
    model = linear()
    with diloco(model) as optimizer:
        assert optimizer.step(lambda: 1.25) == 1.25
        assert optimizer.step() is None


def test_a_round_announces_its_lineage_and_the_hash_of_its_state() -> None:
    model, swarm = linear(), Swarm()
    contract = contract_of(steps=1)
    reports: list[RoundReport] = []
    with diloco(model, contract, swarm, on_round=reports.append) as optimizer:
        first = optimizer.params_hash
        assert swarm.entered == [Position(0, genesis_lineage(contract.digest, first), first)]
        train(model, optimizer, 2)
        digests = [report.outcome.digest for report in reports]
        lineage = swarm.entered[0].lineage
        for round, digest in enumerate(digests, start=1):
            lineage = next_lineage(
                lineage, round=round, weights={"a": 1.0}, tokens={"a": 1}, readings={"a": ()}, average_digest=digest
            )
            assert swarm.positions[round - 1] == Position(round, lineage, "", round)
            assert reports[round - 1].lineage == lineage
        assert optimizer.params_hash == params_hash(optimizer.outer)
    hashes = [report.params_hash.result() for report in reports if report.params_hash is not None]
    assert swarm.hashes == dict(enumerate(hashes, start=1))
    assert len({first, *swarm.hashes.values()}) == 3


# --- what it leaves alone ------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Trained, frozen and tied parameters, and buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = linear(), nn.BatchNorm1d(3), nn.Linear(5, 3, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("positions", torch.arange(7))

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(batch)) + self.second(batch)
        return out


def test_frozen_parameters_and_buffers_stay_as_they_are() -> None:
    model = Mixed()
    with diloco(model, contract_of(steps=2)) as optimizer:
        bias = model.first.bias.clone()
        train(model, optimizer, 3)
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(3))).sum().backward()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
        assert optimizer.round == 2
        assert torch.equal(model.first.bias, bias)
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        assert {"norm.running_mean", "norm.num_batches_tracked", "positions"} <= buffers.keys()


def test_tied_parameters_count_once_and_stay_tied() -> None:
    model, swarm = Mixed(), Swarm()
    with diloco(model, contract_of(steps=1), swarm) as optimizer:
        assert swarm.vectors["theta"].numel() == 15 + 3 + 3  # weight, norm's gain and bias; first.bias is frozen
        train(model, optimizer, 2)
        assert model.second.weight is model.first.weight
        assert torch.equal(model.first.weight.detach().reshape(-1), optimizer.outer.theta[:15])


def test_bf16_parameters_keep_their_dtype_while_theta_keeps_fp32() -> None:
    model = linear(dtype=torch.bfloat16)
    with diloco(model, contract_of(steps=2)) as optimizer:
        train(model, optimizer, 4)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        theta = optimizer.outer.theta
        assert not torch.equal(theta, theta.bfloat16().float())
        assert torch.equal(flat(list(model.parameters())), theta.bfloat16().float())


def test_a_bf16_replica_that_does_not_move_has_no_pseudo_gradient() -> None:
    model, swarm = linear(dtype=torch.bfloat16), Swarm()
    with diloco(model, contract_of(steps=1), swarm) as optimizer:
        train(model, optimizer, 1)
        optimizer.zero_grad()
        optimizer.step()
        assert swarm.gradients[0].any()
        assert not swarm.gradients[1].any()


def test_outer_adam_has_a_second_moment_and_the_others_do_not() -> None:
    for name in ("nesterov", "adam"):
        swarm = Swarm()
        with diloco(linear(), contract_of(optimizer=name), swarm):
            assert swarm.vectors["second_moment"].numel() == (18 if name == "adam" else 0)


# --- torch's habits ------------------------------------------------------------------------------------


def test_a_learning_rate_scheduler_works_on_it() -> None:
    model = linear()
    with diloco(model, contract_of(steps=100)) as optimizer:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for lr in (0.1, 0.05, 0.025):
            before = model.weight.detach().clone()
            train(model, optimizer, 1)
            assert model.weight.grad is not None
            torch.testing.assert_close(model.weight.detach(), before - lr * model.weight.grad)
            scheduler.step()
        assert optimizer.inner.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.0125


def test_torchs_gradient_scaler_works_on_it_and_an_overflow_is_no_step() -> None:
    model, twin = linear(), linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with diloco(model, contract_of(steps=2)) as optimizer:
        while optimizer.round < 1:
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 5)).square().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 2.0**127
        assert optimizer.phase.steps == 0
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        with diloco(twin, contract_of(steps=2), inner=plain) as other:
            for _ in range(2):
                other.zero_grad()
                twin(torch.ones(4, 5)).square().sum().backward()
                other.step()
        torch.testing.assert_close(flat(list(model.parameters())), flat(list(twin.parameters())))


def test_clipping_and_zero_grad_see_the_inner_optimizers_groups() -> None:
    model = linear()
    groups: list[dict[str, Any]] = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias]}]
    with diloco(model, inner=torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)) as optimizer:
        assert optimizer.param_groups is optimizer.inner.param_groups
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        model(torch.ones(1, 5)).sum().backward()
        optimizer.zero_grad()
        assert model.weight.grad is None


def test_saved_state_continues_with_the_same_bits() -> None:
    model, other = linear(), linear(seed=9)
    with (
        diloco(model, contract_of(steps=50), inner=torch.optim.AdamW(model.parameters(), lr=0.01)) as optimizer,
        diloco(other, contract_of(steps=50), inner=torch.optim.AdamW(other.parameters(), lr=0.5)) as restored,
    ):
        train(model, optimizer, 3)
        other.load_state_dict(model.state_dict())
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert restored.param_groups is restored.inner.param_groups
        assert restored.state is restored.inner.state
        assert restored.param_groups[0]["lr"] == 0.01
        for each, its_model in ((optimizer, model), (restored, other)):
            train(its_model, each, 2, seed=5)
        assert torch.equal(flat(list(model.parameters())), flat(list(other.parameters())))


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
    with diloco(model, contract_of(steps=1), swarm, on_round=reports.append) as optimizer:
        before = flat(list(model.parameters()))
        there, theta = Position(missed, "ab" * 32, "", tokens=40), torch.randn_like(before)
        swarm.ahead, swarm.counted = (there, theta), counted
        train(model, optimizer, 1)
        assert (optimizer.round, optimizer.outer.lineage, optimizer.tokens) == (missed, "ab" * 32, 40)
        assert torch.equal(swarm.vectors["theta"], theta)
        work = swarm.gradients[0]
        assert torch.equal(flat(list(model.parameters())), theta - work if keeps else theta)
        assert work.abs().max() > 0
        assert [report.outcome.verdict for report in reports] == ["resync"]


def test_a_swarm_that_comes_into_sight_late_is_caught_up_with_before_the_first_step() -> None:
    model, swarm = linear(), Swarm()
    there = Position(5, "ab" * 32, "", tokens=40), torch.ones(18)
    swarm.late_sight = there
    with diloco(model, swarm=swarm) as optimizer:
        assert (optimizer.round, optimizer.outer.lineage, optimizer.recovery.position) == (5, "ab" * 32, there[0])
        assert torch.equal(flat(list(model.parameters())), there[1])


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
        assert optimizer.ledger == Ledger().after(theirs["readings"])
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
