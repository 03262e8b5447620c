"""k workers in one process, no network: the same worker, inner and outer code; only the all-reduce is replaced.

It is the oracle of the tests: a real swarm with codec `none` follows it within fp32 rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opendiloco.codec import get_codec
from opendiloco.config import ComputeConfig, Contract, PeerConfig
from opendiloco.logs import setup_logging
from opendiloco.metrics import MetricsLog
from opendiloco.plan import EVERYBODY, Plan
from opendiloco.settings import Settings, write_toml
from opendiloco.simulated import AnotherFailedError, SimulatedGroup
from opendiloco.worker import Worker

logger = logging.getLogger(__name__)


def run_simulation(contract: Contract, compute: ComputeConfig, *, workers: int, out: Path) -> int:
    """Train with simulated workers; the folders are those of a real swarm's workers."""
    with setup_logging(out / "log.txt", console=True):
        write_toml(out / "run.toml", contract)
        names = [f"worker-{index}" for index in range(workers)]
        finished = simulate(contract, compute, names, out)
        finished[0].save(out / "model", metrics=[out / name / "metrics.jsonl" for name in names])
    return 0


def simulate(
    contract: Contract,
    compute: ComputeConfig,
    names: Sequence[str],
    out: Path,
    *,
    plan: Plan = EVERYBODY,
    sources: Mapping[str, str] | None = None,
) -> list[Worker]:
    """Train one worker per name, each in a thread and a folder of its own; returns them after their last round.

    Args:
        names: peer ids; they decide which text a worker reads, as in a real swarm.
        sources: data.source of workers that have text of their own, which they validate on as well.
    """
    group = SimulatedGroup(names, get_codec(contract.outer.codec), plan)

    def work(name: str) -> Worker | None:
        data = contract.data.model_copy(update={"source": (sources or {}).get(name, contract.data.source)})
        settings = Settings(contract.model_copy(update={"data": data}), PeerConfig(compute=compute))
        folder, worker = out / name, None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with MetricsLog(folder / "metrics.jsonl", name) as metrics:
                for stay in plan.stays(name, contract.run.rounds):
                    if stay.start > 1:
                        group.donor(stay.start - 1).result()
                    member = group.member(name, last=stay[-1] if stay[-1] < contract.run.rounds else None)
                    worker = Worker(settings, member, metrics, name=name, leaving=member.leaving)
                    worker.train()
            return worker
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(len(names), thread_name_prefix="simulated worker") as threads:
        futures = [threads.submit(work, name) for name in names]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, AnotherFailedError)):
        raise error  # the reason first, not what it did to the others
    return [worker for future in futures if (worker := future.result()) is not None]
