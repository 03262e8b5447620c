"""What peers claim about themselves in signed records: models that check type and size, and allocate nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from opendiloco.evaluation import EvaluationPart
from opendiloco.ledger import MAX_READINGS

MAX_LIFETIME_S = 300.0  # of a record: peers refuse one that claims more
MAX_PARTS = 4  # of evaluations, in a record: whoever looks once a round misses none
MAX_ROUNDS = 8
MAX_EVALUATIONS = 8

HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Session = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Time = Annotated[float, Field(ge=0, le=1e11)]
Round = Annotated[int, Field(ge=0, le=2**40)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
MAX_LOSS = 1e4
"""Nats a token."""
Loss = Annotated[float, Field(ge=0, le=MAX_LOSS)]


class Claim(BaseModel):
    """Base of all: typed, of a size, nothing that is no number."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class ToldPart(Claim):
    """What a worker's share of an evaluation came to: see `evaluation.EvaluationPart`."""

    lineage: HexDigest
    loss: Loss
    tokens: Annotated[int, Field(ge=1, le=2**40)]


FOLLOW = ("following", "late")
"""States of workers that bring no values to their round."""


class Progress(Claim):
    """What a worker says about itself. Times are DHT times (Unix seconds)."""

    session: Session
    """Random per process: tells a restarted peer from a second process with the same key."""
    started: Time
    issued: Time
    contract: HexDigest
    layout: HexDigest
    round: Annotated[int, Field(ge=0, le=2**40)]
    """Outer rounds committed."""
    lineage: HexDigest
    params_hash: HexDigest
    hashed_round: Annotated[int, Field(ge=0, le=2**40)]
    """The round that `params_hash` belongs to: hashing lags behind committing."""
    committed_tokens: Annotated[int, Field(ge=0, le=2**60)]
    """Tokens trained on by all participants in the rounds of the lineage."""
    state: Literal["training", "averaging", "following", "late", "left"]
    """following: came in the middle of an inner phase, and takes part from the next round on. late: the same, after it
    has missed rounds in a row because it takes long to fetch one; `expected_finish` is when it expects to be there."""
    steps: Annotated[int, Field(ge=0, le=2**40)]
    """Inner steps done in this round."""
    tokens_per_s: Annotated[float, Field(ge=0, le=1e12)]
    expected_finish: Time
    client_mode: bool
    shards: Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=MAX_READINGS)]
    """Of the training text: leased to this worker for as long as the record lives; see `leases`."""
    evaluated: Annotated[list[ToldPart], Field(max_length=MAX_PARTS)] = []
    """Its parts of the last evaluations that several workers shared."""

    @model_validator(mode="after")
    def _begins_with_nothing(self) -> Self:
        if self.round == 0 and self.committed_tokens > 0:  # it would win over all others, and there is nothing to fetch
            raise ValueError("tokens before the first round")
        return self


def told_after(told: Sequence[ToldPart], part: EvaluationPart) -> list[ToldPart]:
    """What a record says of evaluations after one more; a loss that is none is not told."""
    if not 0 <= part.loss <= MAX_LOSS:
        return list(told)
    return [*told, ToldPart(lineage=part.lineage, loss=part.loss, tokens=part.tokens)][-MAX_PARTS:]


class ToldRound(Claim):
    """A committed round at one worker."""

    round: Round
    """The one that ended, from 1."""
    ended: Time
    """By this worker's clock, Unix seconds."""
    participants: Annotated[int, Field(ge=0, le=2**20)]
    has_vote: bool
    """Whether this worker's own work is in the average."""
    loss: Loss | None = None
    """Mean over this worker's inner phase; None where its loop does not say."""
    inner_s: Seconds
    wait_s: Seconds
    rendezvous_s: Seconds
    allreduce_s: Seconds
    outer_s: Seconds
    sent_bytes: Bytes
    received_bytes: Bytes
    share: Annotated[float, Field(ge=0, le=1)]
    """Of the vector, that this worker has averaged for the others."""


class ToldLoss(Claim):
    """What the inner phase of a round came to, which is known later than the round itself."""

    round: Round
    loss: Loss


class ToldEvaluation(Claim):
    """Validation of the outer parameters after a round; rounds of which several workers tell have it from each."""

    round: Round
    loss: Loss
    tokens: Annotated[int, Field(ge=1, le=2**40)]
    """Predicted ones, which the number stands on."""


class Told(Claim):
    """What a worker tells those who only look: its last rounds and evaluations.

    Nothing is decided by it. So it travels apart from the progress, which everybody reads at every beat; seldom, and it
    lives long enough for somebody who looks once a minute.
    """

    session: Session
    """As in its progress."""
    version: Annotated[str, Field(max_length=32, pattern=r"^[0-9A-Za-z.+_-]*$")]
    """Of this package."""
    bandwidth: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Bytes per second that it can send, as measured; 0 while it is not known."""
    rounds: Annotated[list[ToldRound], Field(max_length=MAX_ROUNDS)] = []
    evaluations: Annotated[list[ToldEvaluation], Field(max_length=MAX_EVALUATIONS)] = []

    def after(self, news: ToldRound | ToldLoss | ToldEvaluation) -> Told:
        """The same with something more; the oldest gives way."""
        match news:
            case ToldRound():
                return self.model_copy(update={"rounds": [*self.rounds, news][-MAX_ROUNDS:]})
            case ToldLoss():
                rounds = [
                    told.model_copy(update={"loss": news.loss}) if told.round == news.round else told
                    for told in self.rounds
                ]
                return self.model_copy(update={"rounds": rounds})
            case ToldEvaluation():
                earlier = [told for told in self.evaluations if told.round != news.round]
                return self.model_copy(update={"evaluations": [*earlier, news][-MAX_EVALUATIONS:]})


News = ToldRound | ToldLoss | ToldEvaluation


@dataclass(frozen=True)
class Seen:
    """What is on the DHT of one worker."""

    progress: Progress | None
    """None: none that makes sense."""
    until: float
    """When that expires, Unix seconds."""
    told: Told | None
