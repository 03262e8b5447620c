"""DiLoCo around a model of a few values, in a swarm whose rounds come to what a test says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from opendiloco.averager import Averager, contribution_bytes
from opendiloco.claims import News
from opendiloco.codec import get_codec
from opendiloco.config import Contract
from opendiloco.diloco import DiLoCo
from opendiloco.errors import SettingsError
from opendiloco.ledger import Reading
from opendiloco.phase import PhaseReport
from opendiloco.report import RoundReport
from opendiloco.rounds import Position, Recovery, RoundOutcome, RoundRequest
from opendiloco.simulated import SimulatedGroup

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
        self.told: list[News] = []
        self.refusal = ""
        self.ahead: tuple[Position, Tensor] | None = None
        self.counted = False
        self.inner_step = 0
        self.following: list[bool] = []
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
        if self.ahead is not None:
            position, theta = self.ahead
            self.vectors["theta"].copy_(theta)
            self._member.committed(position)
        found, recovery = self._member.catch_up().result(), Future[Recovery]()
        recovery.set_result(replace(found, has_own_work=self.counted, inner_step=self.inner_step))
        return recovery

    def begin_phase(self, *, following: bool, steps: int) -> None:
        self.following.append(following)

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

    def tell(self, news: News) -> None:
        self.told.append(news)


@contextmanager
def diloco(
    model: nn.Module,
    contract: Contract | None = None,
    swarm: Averager | None = None,
    *,
    inner: torch.optim.Optimizer | None = None,
    on_round: Callable[[RoundReport], None] = lambda report: None,
    on_catch_up: Callable[[Recovery], None] = lambda recovery: None,
    leaving: Callable[[], bool] = lambda: False,
) -> Iterator[DiLoCo]:
    inner = inner or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = DiLoCo(
        inner,
        model,
        swarm or Swarm(),
        contract or contract_of(),
        on_round=on_round,
        on_catch_up=on_catch_up,
        leaving=leaving,
    )
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
