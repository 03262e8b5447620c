"""What a round costs on paper: bytes, bandwidth, the length of a step, churn. Its figures come from runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opendiloco.rounds import stretch

BYTES_PER_VALUE = {"int8": 1 + 4 / 1024, "fp16": 2.0, "none": 4.0, "fp32": 4.0}
"""On the wire, scales included."""
FLOPS_PER_TOKEN = 6
"""Times the parameters: forward and backward of a transformer (arXiv:2001.08361)."""


def payload_s(values: float, workers: int, codec: str, mbit: float) -> float:
    """Seconds that a butterfly's payload takes one way through one link, the other way going on at the same time."""
    return 2 * (workers - 1) / workers * values * BYTES_PER_VALUE[codec] * 8 / (mbit * 1e6)


@dataclass(frozen=True)
class Measured:
    """A round's exchange over shaped links: median seconds, rendezvous included."""

    values: int
    workers: int
    codec: str
    mbit: float
    seconds: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Measured:
        """A record of `bench wan`."""
        return cls(record["values"], record["workers"], record["codec"], record["mbit"], record["round_s"])

    @property
    def payload_s(self) -> float:
        """Of it, what the payload alone would take."""
        return payload_s(self.values, self.workers, self.codec, self.mbit)


@dataclass(frozen=True)
class Exchange:
    """An exchange takes `wire_factor` times its payload's seconds, and `fixed_s` whatever its size."""

    wire_factor: float
    """Headers, encryption, acknowledgements, and links that stand idle."""
    fixed_s: float
    """Rendezvous, opening streams, encoding and decoding of what these runs moved."""

    def seconds(self, values: float, workers: int, codec: str, mbit: float) -> float:
        """Of the exchange of one round."""
        return self.fixed_s + self.wire_factor * payload_s(values, workers, codec, mbit)


LARGE_FROM = 8
"""Workers. In a smaller swarm everybody keeps every record and is asked for it: other rules hold."""
COMPANY_FIELDS = ("standing_bytes_per_s", "round_bytes", "round_cpu_s")


@dataclass(frozen=True)
class Company:
    """What it takes a worker that there are others, measured; see `bench dht`."""

    workers: int
    standing_bytes_per_s: float
    """Both ways, between two rounds."""
    round_bytes: float
    """Both ways, beside the values."""
    round_cpu_s: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Company:
        """A record of `bench dht`."""
        return cls(record["workers"], *(float(record[name]) for name in COMPANY_FIELDS))


def predict_company(measured: Sequence[Company], workers: int) -> Company:
    """What follows for another number: each quantity grows with it, and what is told at beats slows down with them.

    The relative errors are least, by least squares. Needs two numbers of workers from `LARGE_FROM` on; smaller ones do
    not count.
    """
    found, measured = [], [one for one in measured if one.workers >= LARGE_FROM]
    for name in COMPANY_FIELDS:
        values = np.array([getattr(one, name) for one in measured])
        terms = np.array([_company_terms(name, one.workers) for one in measured]) / values[:, None]
        factors, *_ = np.linalg.lstsq(terms, np.ones(len(measured)), rcond=None)
        found.append(float(np.dot(factors, _company_terms(name, workers))))
    return Company(workers, *found)


def company_errors(measured: Sequence[Company]) -> list[dict[str, float]]:
    """Relative errors of each number of workers as the others predict it, from `LARGE_FROM` on."""
    errors, measured = [], [one for one in measured if one.workers >= LARGE_FROM]
    for index, one in enumerate(measured):
        predicted = predict_company([other for at, other in enumerate(measured) if at != index], one.workers)
        errors.append({name: getattr(predicted, name) / getattr(one, name) - 1 for name in COMPANY_FIELDS})
    return errors


def _company_terms(name: str, workers: int) -> list[float]:
    slower = stretch(workers) if name == "standing_bytes_per_s" else 1.0
    return [1 / slower, workers / slower]


def fit(runs: Sequence[Measured]) -> Exchange:
    """The exchange whose relative errors are least, by least squares. Needs two runs of different length."""
    measured = np.array([run.seconds for run in runs])
    terms = np.array([[run.payload_s, 1.0] for run in runs]) / measured[:, None]
    (wire_factor, fixed_s), *_ = np.linalg.lstsq(terms, np.ones(len(runs)), rcond=None)
    return Exchange(float(wire_factor), float(fixed_s))


def held_out_errors(runs: Sequence[Measured]) -> list[float]:
    """Relative error of each run as all the others predict it: what the model is worth where nothing was measured."""
    errors = []
    for index, run in enumerate(runs):
        exchange = fit([other for at, other in enumerate(runs) if at != index])
        predicted = exchange.seconds(run.values, run.workers, run.codec, run.mbit)
        errors.append(predicted / run.seconds - 1)
    return errors


@dataclass(frozen=True)
class Training:
    """A worker's inner phase: `steps` steps of `tokens` tokens each, at `flops` useful operations per second."""

    parameters: float
    steps: int
    tokens: int
    flops: float

    @property
    def inner_s(self) -> float:
        """Seconds of one inner phase."""
        return self.steps * self.tokens * FLOPS_PER_TOKEN * self.parameters / self.flops


def utilization(
    training: Training, exchange_s: float, *, workers: int, deaths_per_hour: float = 0.0, recovery_s: float = 0.0
) -> float:
    """Share of all workers' time in which they train on what counts.

    Args:
        deaths_per_hour: of one worker, without a word; each costs it half a phase of work on average, and all others
            `recovery_s`.
    """
    round_s = training.inner_s + exchange_s
    deaths = workers * deaths_per_hour * round_s / 3600
    useful = training.inner_s * max(0.0, 1 - deaths / (2 * workers))
    return useful / (round_s + deaths * recovery_s)
