"""Several sources mixed with weights: which one the next sequence comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError
from opendiloco.sequences import permutation
from opendiloco.text import check_source

_FORM = 'write a weight and a source, such as "0.7 jsonl:a.jsonl"'


@dataclass(frozen=True)
class Mixture:
    """Weights of the sources as whole numbers, and which of them is first when two are equally due."""

    weights: tuple[int, ...]
    ranks: tuple[int, ...]

    def next_source(self, taken: Sequence[int]) -> int:
        """The source of the next sequence of a reader that has taken so many of each.

        After any number of sequences each source's count differs by less than 1 from its share of them, so that shares
        hold in every round of every worker. Whole numbers throughout: the same on every machine.

        R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): of the sources that are behind
        enough, the one that would be the first to be too far behind.
        """
        total, number = sum(self.weights), sum(taken) + 1
        scale = max(1, 2 * len(self.weights) - 2)
        behind = [scale * (w * number - count * total) for w, count in zip(self.weights, taken, strict=True)]
        due = [source for source, value in enumerate(behind) if value >= total or len(behind) == 1]
        return min(
            due,
            key=lambda source: (
                Fraction((scale - 1) * total - behind[source], self.weights[source]),
                self.ranks[source],
            ),
        )

    def shares(self, count: int) -> list[int]:
        """How many of `count` sequences are of each source; at least one."""
        taken = [0] * len(self.weights)
        for _ in range(count):
            taken[self.next_source(taken)] += 1
        return [max(1, number) for number in taken]


def split_sources(data: DataConfig) -> tuple[list[DataConfig], list[Fraction]]:
    """The settings of each source alone, and their weights.

    Raises:
        SettingsError: an entry of a list that is no weight and source.
    """
    if isinstance(data.source, str):
        return [data], [Fraction(1)]
    weights, sources = [], []
    for entry in data.source:
        weight, _, source = entry.strip().partition(" ")
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?|\.\d{1,9}", weight) or not source.strip():
            raise SettingsError(f"data.source has the entry {entry!r}: {_FORM}")
        if not Fraction(weight):
            raise SettingsError(f"data.source has the entry {entry!r} of weight 0: give it a weight or leave it out")
        weights.append(Fraction(weight))
        sources.append(data.model_copy(update={"source": source.strip()}))
    return sources, weights


def check_sources(data: DataConfig) -> None:
    """Find out at once, without reading anything, what is wrong with data.source. Raises SettingsError."""
    for source in split_sources(data)[0]:
        check_source(source)


def mixture(weights: Sequence[Fraction], *, seed: int) -> Mixture:
    """The mixture of sources with these weights; `seed` decides what the weights leave open."""
    common = math.lcm(*(weight.denominator for weight in weights))
    order = permutation(len(weights), "sources", seed)
    return Mixture(tuple(int(weight * common) for weight in weights), tuple(int(rank) for rank in order))
