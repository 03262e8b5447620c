"""Pure decisions of an evaluation: after which rounds, by whom, which part of the held-out text, the sum of the parts.

Nobody has to say a word for it: who took part in the last committed round is in every replica's ledger, and the
lineage draws among them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from opendiloco.rounds import leader_order


@dataclass(frozen=True)
class Share:
    """Which of the held-out sequences a worker evaluates: every `of`-th one, from `index` on."""

    index: int
    of: int

    @property
    def is_all(self) -> bool:
        """Whether nobody else is needed for the whole."""
        return self.of == 1

    def of_sequences(self, count: int) -> slice:
        """Its sequences of `count`."""
        return slice(self.index, count, self.of)

    def count(self, sequences: int) -> int:
        """How many of `sequences` these are."""
        return len(range(self.index, sequences, self.of))


ALL = Share(0, 1)


@dataclass(frozen=True)
class EvaluationPart:
    """What one worker's share of an evaluation came to."""

    lineage: str
    """Of the parameters: it stands for the round, too."""
    loss: float
    """Mean over `tokens`, nats."""
    tokens: int


def is_due(round: int, *, every_rounds: int, last_round: int) -> bool:
    """Whether the parameters after `round` are evaluated: every few rounds, and the first and the last ones always."""
    return round % every_rounds == 0 or round >= last_round


def shares(
    by: Literal["each", "one", "shared"], *, lineage: str, participants: Collection[str], peer: str
) -> dict[str, Share]:
    """What each worker evaluates of the parameters of `lineage`, as far as `peer` needs to know; others nothing.

    Args:
        participants: of the round that led there. Without any (the initial parameters) each worker is on its own.
    """
    if by == "each" or not participants:
        return {peer: ALL}
    order = leader_order(f"evaluation of {lineage}", participants)
    if by == "one":
        return {order[0]: ALL}
    return {each: Share(index, len(order)) for index, each in enumerate(order)}


def total(parts: Mapping[str, EvaluationPart], expected_tokens: Mapping[str, int]) -> tuple[float, int] | None:
    """Mean loss and number of tokens over the parts that have come; None without any.

    A part that is not over as many tokens as its worker's share has is left out. All workers that have seen the same
    parts get the same number.
    """
    good = [part for peer, part in parts.items() if part.tokens == expected_tokens.get(peer) and part.loss < math.inf]
    tokens = sum(part.tokens for part in good)
    return (math.fsum(part.loss * part.tokens for part in good) / tokens, tokens) if tokens else None


def perplexity(loss: float) -> float:
    """exp(loss), as far as a float goes."""
    return math.exp(min(loss, 700.0))
