"""The cells of the quality benchmark: small runs that differ in one thing, and what was published about it. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from opendiloco.plan import Plan


@dataclass(frozen=True)
class Size:
    """What all cells have in common; the defaults are those of the results that the documents cite."""

    steps: int = 500
    """Inner steps of the run, one after the other."""
    inner_steps: int = 10
    """H where a cell does not say."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    """Less than DiLoCo's 0.9, with which runs of 60 rounds stayed behind one worker's."""
    batch_size: int = 8
    seq_len: int = 64
    lr: float = 1e-3
    warmup_steps: int = 50
    layers: int = 2
    hidden_size: int = 64
    kind_bytes: int = 480_000
    """Text of each kind of document."""
    validation_sequences: int = 512
    evaluations: int = 10


QUICK = Size(steps=8, inner_steps=2, batch_size=2, seq_len=32, warmup_steps=2, layers=1, hidden_size=32)
QUICK = Size(**{**asdict(QUICK), "kind_bytes": 20_000, "validation_sequences": 8, "evaluations": 2})


@dataclass(frozen=True)
class Cell:
    """One run. Without any settings it is DiLoCo with 8 workers on the same text, fp32 values."""

    workers: int = 8
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the run contract, by section.key."""
    batch_factor: int = 1
    steps_factor: int = 1
    inner_steps: int | None = None
    is_plain: bool = False
    """One worker's inner optimizer alone: the outer step takes over what it has done."""
    by_kind: bool = False
    """Whether each worker has one kind of document to itself."""
    workers_by_time: tuple[int, ...] = ()
    """How many of the workers train, in equal parts of the run one after the other."""
    lost_share: float = 0.0
    """Probability with which a worker's pseudo-gradient comes too late for a round."""
    pretrained_share: float = 0.0
    """Of the inner steps, those that one plain worker has done before."""

    def inner_steps_of(self, size: Size) -> int:
        """H."""
        return min(self.inner_steps or size.inner_steps, size.steps)

    def pretraining_steps(self, size: Size) -> int:
        """Whole rounds' worth of them."""
        steps = self.inner_steps_of(size)
        return round(self.pretrained_share * size.steps / steps) * steps

    def rounds(self, size: Size) -> int:
        """Of the run itself."""
        steps = self.inner_steps_of(size)
        return (size.steps - self.pretraining_steps(size)) * self.steps_factor // steps

    def names(self) -> list[str]:
        """Of the workers."""
        return [f"worker-{index:02}" for index in range(self.workers)]

    def plan(self, size: Size, seed: int) -> Plan:
        """Who is there and what comes too late; the same for the same seed."""
        names, rounds = self.names(), self.rounds(size)
        lost = losses(names, rounds, share=self.lost_share, seed=seed)
        counts = self.workers_by_time or (self.workers,)

        def is_there(name: str, round: int) -> bool:
            part = min(len(counts) - 1, (round - 1) * len(counts) // rounds)
            return names.index(name) < counts[part]

        return Plan(is_there=is_there, is_lost=lambda name, round: (name, round) in lost)


def losses(names: Sequence[str], rounds: int, *, share: float, seed: int) -> frozenset[tuple[str, int]]:
    """Whose pseudo-gradient comes too late for which round: each with probability `share`, never all of a round."""
    generator, lost = random.Random(seed), set[tuple[str, int]]()
    for round in range(1, rounds + 1):
        drawn = [name for name in names if generator.random() < share]
        while drawn and len(drawn) == len(names):
            drawn = [name for name in names if generator.random() < share]
        lost |= {(name, round) for name in drawn}
    return frozenset(lost)


RAMP = tuple(range(1, 9))
CELLS: dict[str, Cell] = {
    "one worker": Cell(1, is_plain=True),
    "one worker, outer": Cell(1),
    "8x batch": Cell(1, is_plain=True, batch_factor=8),
    "8x updates": Cell(1, is_plain=True, steps_factor=8),
    "DiLoCo": Cell(),
    **{f"H = {steps}": Cell(inner_steps=steps) for steps in (5, 50, 100, 250, 500)},
    **{f"k = {workers}": Cell(workers) for workers in (2, 4, 16)},
    "by kind": Cell(by_kind=True),
    "16 by kind": Cell(16, by_kind=True),
    "Adam": Cell(settings={"outer.optimizer": "adam", "outer.lr": 0.3}),
    "SGD with momentum": Cell(settings={"outer.optimizer": "sgdm"}),
    "SGD": Cell(settings={"outer.optimizer": "sgd", "outer.lr": 1.0}),
    "DiLoCo's momentum": Cell(settings={"outer.momentum": 0.9}),
    **{f"{share} % lost": Cell(lost_share=share / 100) for share in (10, 30, 50)},
    "50 % lost, late work thrown away": Cell(lost_share=0.5, settings={"rounds.max_staleness": 0}),
    "doubling": Cell(workers_by_time=(4, 8)),
    "halving": Cell(workers_by_time=(8, 4)),
    "ramp up": Cell(workers_by_time=RAMP),
    "ramp down": Cell(workers_by_time=RAMP[::-1]),
    "fp16": Cell(settings={"outer.codec": "fp16"}),
    "int8": Cell(settings={"outer.codec": "int8"}),
    **{f"{share} % pretrained": Cell(pretrained_share=share / 100) for share in (12, 24)},
}


@dataclass(frozen=True)
class Row:
    """A cell in a group, and what was published for its like."""

    cell: str
    label: str = ""
    published: float | None = None
    """Perplexity."""
    at: float | None = None
    """Where it is along the group's trend."""


@dataclass(frozen=True)
class Group:
    """Cells that answer one question; the first row is what the others are compared to."""

    question: str
    source: str
    rows: tuple[Row, ...]
    trend: int = 0
    """Published: 1 where perplexity rises from row to row along `at`, -1 where it falls, 0 where nothing is said."""
    along: str = ""


DILOCO = "arXiv:2311.08105"
GROUPS: dict[str, Group] = {
    "time": Group(
        "What does it bring in the same time (inner steps one after the other)?",
        DILOCO,
        (
            Row("one worker", published=16.23),
            Row("one worker, outer", "one worker with an outer optimizer", 16.03),
            Row("DiLoCo", "DiLoCo, 8 workers", 15.02),
            Row("8x batch", "8x batch, data parallel", 15.30),
        ),
    ),
    "tokens": Group(
        "What does it cost at the same number of tokens?",
        DILOCO,
        (
            Row("8x batch", published=15.30),
            Row("8x updates", "8x updates, 8x time", 14.72),
            Row("DiLoCo", "DiLoCo, 8 workers", 15.02),
        ),
    ),
    "steps": Group(
        "How rarely may workers average?",
        f"{DILOCO}: H = 1000 costs 2.9 % against 50",
        (
            Row("H = 5", at=5),
            Row("DiLoCo", "H = 10", at=10),
            *(Row(f"H = {steps}", at=steps) for steps in (50, 100, 250, 500)),
        ),
        trend=1,
        along="H",
    ),
    "workers": Group(
        "How many workers?",
        f"{DILOCO}, iid",
        (
            Row("DiLoCo", "k = 8", 15.08, at=8),
            Row("one worker, outer", "k = 1", 16.03, at=1),
            Row("k = 2", at=2),
            Row("k = 4", published=15.23, at=4),
            Row("k = 16", published=15.02, at=16),
        ),
        trend=-1,
        along="the number of workers",
    ),
    "data": Group(
        "Does it matter that each worker reads another kind of document?",
        DILOCO,
        (Row("DiLoCo", "all kinds, k = 8", 15.08), Row("by kind", "a kind each, k = 8", 15.02)),
    ),
    "data-16": Group(
        "And with 16 workers?",
        DILOCO,
        (Row("k = 16", "all kinds, k = 16", 15.02), Row("16 by kind", "a kind for two each, k = 16", 14.91)),
    ),
    "outer": Group(
        "Which outer optimizer?",
        DILOCO,
        (
            Row("DiLoCo", "Nesterov", 15.02),
            Row("Adam", published=15.45),
            Row("SGD with momentum", published=15.5),
            Row("SGD", "SGD (plain averaging)", 16.81),
            Row("DiLoCo's momentum", "Nesterov with a momentum of 0.9"),
        ),
    ),
    "losses": Group(
        "What if pseudo-gradients come too late?",
        f"{DILOCO}: 50 % cost 2.1 %",
        (
            Row("DiLoCo", "none lost", 1.0, at=0),
            *(Row(f"{share} % lost", at=share) for share in (10, 30)),
            Row("50 % lost", published=1.021, at=50),
            Row("50 % lost, late work thrown away"),
        ),
        trend=1,
        along="the share that is lost",
    ),
    "over-time": Group(
        "Workers that come and go: is it their total that counts?",
        f"{DILOCO}: quality follows total compute",
        (
            Row("DiLoCo", "8 all the time", at=8),
            Row("doubling", "4, then 8", at=6),
            Row("halving", "8, then 4", at=6),
            Row("ramp up", "1 to 8", at=4.5),
            Row("ramp down", "8 to 1", at=4.5),
            Row("one worker, outer", "1 all the time", at=1),
        ),
        trend=-1,
        along="the mean number of workers",
    ),
    "codec": Group(
        "Do lossy values cost quality?",
        "arXiv:2407.07852: fp16 loses nothing",
        (Row("DiLoCo", "none (fp32)", 1.0), Row("fp16", published=1.0), Row("int8")),
    ),
    "pretraining": Group(
        "Does it have to start from a model that one worker has trained?",
        f"{DILOCO}: 0, 12k and 24k of 88k steps",
        (
            Row("DiLoCo", "from the start", 15.02),
            Row("12 % pretrained", "after 12 % of the steps", 14.91),
            Row("24 % pretrained", "after 24 %", 15.02),
        ),
    ),
}


def cells_of(groups: Sequence[str]) -> list[str]:
    """The cells of groups, each once, in their order."""
    return list(dict.fromkeys(row.cell for group in groups for row in GROUPS[group].rows))
