"""A worker as a command, top-down: join the swarm, agree on the contract, train to the end of the run or on request."""

from __future__ import annotations

import contextlib
import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from opendiloco.addresses import AddressFiles
from opendiloco.checkpoint import CheckpointWriter, check_resume, load_checkpoint
from opendiloco.config import Contract
from opendiloco.display import Display
from opendiloco.errors import SwarmError
from opendiloco.folder import EarlierLife, check_folder, check_owner
from opendiloco.leave import Leave, LeaveRequest, ends_in_order, run
from opendiloco.logs import setup_logging
from opendiloco.metrics import MetricsLog
from opendiloco.precheck import check_replica, check_texts
from opendiloco.settings import Settings, write_toml
from opendiloco.swarm import Swarm
from opendiloco.trackers import check_sinks, open_sinks

if TYPE_CHECKING:
    from opendiloco.ranks import Ranks

logger = logging.getLogger(__name__)


def run_worker(
    settings: Settings, out: Path, *, run_id: str | None, resume: str | None, address_file: Path | None
) -> int:
    """Train as one worker of a run until its last round, SIGINT or SIGTERM; returns the exit code.

    Raises:
        OpendilocoError: one line for the user, with the exit code.
    """
    from opendiloco.ranks import Ranks  # seconds of importing

    ranks = Ranks.from_environment()
    with setup_logging(None, console=True):
        if not ranks.is_first:
            from opendiloco.replica import assist

            return assist(ranks)
        logger.info("a worker starts, in %s", out)
        check_before_network(settings, out, ranks, resume)
        addresses = AddressFiles(out / "addresses", address_file)
    leaving, life = LeaveRequest(), EarlierLife(out)
    with (
        ends_in_order(leaving),  # before the first inner step
        setup_logging(out / "log.txt", console=True),
        ranks,  # ends last: torchrun takes the end of any process for a reason to end this one
        leaving,
        Swarm(settings.peer.swarm, out, leaving=leaving) as swarm,
        MetricsLog(out / "metrics.jsonl", swarm.peer_id) as metrics,
        addresses,  # no earlier: the files may be those of a living worker, whose key this one cannot use
    ):
        write_toml(out / "peer.toml", settings.peer)  # a full disk is told before this peer is on the network
        # Seconds, while the network process starts. In a thread: an import that a signal interrupts may go on, or loop.
        run(lambda: import_module("opendiloco.worker"), leaving, name="imports")
        from opendiloco.worker import Worker

        swarm.open()
        settings, has_company = agree_on_contract(settings, swarm, run_id, kept=out if resume else None)
        check_owner(out, settings.contract)
        if leaving():
            raise Leave  # before others count on it
        checkpoint = load_checkpoint(resume, out, contract=settings.contract.digest) if resume is not None else None
        write_toml(out / "run.toml", settings.contract)
        if checkpoint is not None:
            logger.info("resumes from the checkpoint of round %d", checkpoint.position.round)
        elif not has_company:
            life.begin_anew(settings.contract, resume)
        elif resume is not None:
            logger.info("--resume %s: %s holds no checkpoint yet, the swarm has the state", resume, out)
        addresses.write(swarm.addresses)
        writer = CheckpointWriter(out / "checkpoints", keep=settings.peer.checkpoint.keep)
        with (
            Display(settings.contract) as display,
            contextlib.closing(writer),
            open_sinks(settings, out, swarm.peer_id) as sinks,
        ):
            metrics.forward(sinks.take)
            worker = Worker(
                settings,
                swarm,
                metrics,
                ranks=ranks,
                leaving=leaving,
                display=display,
                checkpoint=checkpoint,
                writer=writer,
            )
            if worker.begins_run:  # others may have gone since
                life.begin_anew(settings.contract, resume)
            worker.train()
            if leaving():
                swarm.leave()  # before what may take long: nobody shall wait for this worker
            if worker.optimizer.has_state:
                worker.save(out / "model")
                logger.info("the outer parameters of round %d are in %s", worker.optimizer.round, out / "model")
    return 0


def check_before_network(settings: Settings, out: Path, ranks: Ranks, resume: str | None) -> None:
    """Raise SettingsError for whatever can be known by now; the swarm's contract is looked at when it is there."""
    from opendiloco.ranks import check_batch

    check_sinks(settings.peer.log.sinks)
    check_folder(out)
    if resume is not None:
        check_resume(resume, out)
    if settings.has_run_file or not settings.peer.swarm.peers:
        check_owner(out, settings.contract)
        check_batch(settings.contract, ranks)
        check_texts(settings.contract.data)
        check_replica(settings.contract, settings.peer.compute)


def warn_of_long_warmup(contract: Contract) -> None:
    """Where a run is so short that little of it has the learning rate that was asked for."""
    steps = contract.run.rounds * contract.inner.steps
    if 2 * contract.inner.warmup_steps > steps:
        logger.warning(
            "inner.warmup_steps is %d, and the whole run has %d inner steps (run.rounds times inner.steps): set "
            "inner.warmup_steps to %d or less, or little of it has the learning rate inner.lr",
            contract.inner.warmup_steps,
            steps,
            steps // 10,
        )


def agree_on_contract(
    settings: Settings, swarm: Swarm, run_id: str | None, *, kept: Path | None = None
) -> tuple[Settings, bool]:
    """Settings with the contract that this worker trains under, the swarm's where it has one; and whether others do.

    Args:
        kept: a folder that --resume could go on with alone.

    Raises:
        SettingsError: the user asked for something else than the swarm's contract says.
        SwarmError: this worker brings no contract, and the swarm has no such run.
    """
    limit_s = settings.peer.swarm.startup_timeout_s
    brings_contract = settings.has_run_file or not settings.peer.swarm.peers
    if run_id is None and "run.id" in settings.explicit:
        run_id = settings.contract.run.id
    wanted = settings.contract.run.id if brings_contract else run_id
    theirs = swarm.find_contract(wanted, wait_s=0.0, with_workers=not brings_contract)
    if theirs is None and not brings_contract:
        logger.info("waiting up to %g s for a worker of run %s", limit_s, run_id or "(any)")
        theirs = swarm.find_contract(wanted, wait_s=limit_s)
    if theirs is not None:
        settings = settings.adopt(theirs)
        others = not brings_contract or swarm.find_contract(theirs.run.id, wait_s=0.0) is not None
        alone = "" if others else ", where none of its workers is left"
        logger.info("run %s: contract %s, taken from the swarm%s", theirs.run.id, theirs.digest[:12], alone)
        return settings, others
    if brings_contract:
        logger.info(
            "run %s: contract %s, brought by this worker", settings.contract.run.id, settings.contract.digest[:12]
        )
        warn_of_long_warmup(settings.contract)
        return settings, False
    runs = sorted(swarm.runs())
    named = f"run {run_id}" if run_id else "any run"
    there = f"; the swarm has runs {', '.join(runs)}" if runs else ""
    cure = "wait for a worker of the run to start, or start one here with --run RUN.toml"
    if kept is not None and (kept / "run.toml").is_file():
        cure += f", or go on alone with what is in {kept} (--resume without --peers)"
    raise SwarmError(f"0 peers of {named}{there}: {cure}")
