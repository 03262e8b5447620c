"""A worker as a command, top-down: join the swarm, agree on the contract, train to the end of the run or on request."""

from __future__ import annotations

import contextlib
import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from opendiloco.addresses import check_address_file, forget_addresses, write_addresses
from opendiloco.checkpoint import CheckpointWriter, check_resume, checkpoints, load_checkpoint
from opendiloco.config import Contract
from opendiloco.display import Display
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.leave import Leave, LeaveRequest, ends_in_order, run
from opendiloco.logs import setup_logging
from opendiloco.metrics import MetricsLog
from opendiloco.precheck import check_replica, check_texts
from opendiloco.settings import Settings, load_settings, write_toml
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
        for file in (out / "addresses", address_file):
            check_address_file(file)
    leaving = LeaveRequest()
    with (
        ends_in_order(leaving),  # before the first inner step
        setup_logging(out / "log.txt", console=True),
        ranks,  # ends last: torchrun takes the end of any process for a reason to end this one
        leaving,
        Swarm(settings.peer.swarm, out, leaving=leaving) as swarm,
        MetricsLog(out / "metrics.jsonl", swarm.peer_id) as metrics,
    ):
        address_files = (out / "addresses", address_file)
        for file in address_files:
            forget_addresses(file)  # no earlier: they may be those of a living worker, whose key this one cannot use
        write_toml(out / "peer.toml", settings.peer)  # a full disk is told before this peer is on the network
        # Seconds, while the network process starts. In a thread: an import that a signal interrupts may go on, or loop.
        run(lambda: import_module("opendiloco.worker"), leaving, name="imports")
        from opendiloco.worker import Worker

        swarm.open()
        settings, has_brought_contract = agree_on_contract(settings, swarm, run_id)
        check_owner(out, settings.contract)
        if leaving():
            raise Leave  # before others count on it
        checkpoint = load_checkpoint(resume, out, contract=settings.contract.digest) if resume is not None else None
        write_toml(out / "run.toml", settings.contract)
        for file in address_files:
            write_addresses(file, swarm.addresses)
        if checkpoint is not None:
            logger.info("resumes from the checkpoint of round %d", checkpoint.position.round)
        elif has_brought_contract:
            warn_of_earlier_life(out, resume)
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
        check_resume(resume)
    if settings.has_run_file or not settings.peer.swarm.peers:
        check_owner(out, settings.contract)
        check_batch(settings.contract, ranks)
        check_texts(settings.contract.data)
        check_replica(settings.contract, settings.peer.compute)


def check_folder(out: Path) -> None:
    """Raise SettingsError where a worker's folder holds a file in the place of one of its own folders, or a folder."""
    for name in ("checkpoints", "model", "roundlog"):
        if (out / name).exists() and not (out / name).is_dir():
            raise SettingsError(f"--out {out} holds a file named {name}: move it, or name another folder")
    for name in ("run.toml", "peer.toml", "metrics.jsonl", "log.txt"):
        if (out / name).is_dir():
            raise SettingsError(f"--out {out} holds a folder named {name}: move it, or name another folder")


def check_owner(out: Path, contract: Contract) -> None:
    """Raise SettingsError where a worker's folder holds what another run has left there: this one would replace it."""
    kept = out / "run.toml"
    if not kept.is_file() or not (_has_trained(out) or (out / "model").exists()):
        return
    try:
        theirs = load_settings(kept).contract
    except SettingsError:
        return  # of another version: nothing can be said
    if theirs.digest != contract.digest:
        raise SettingsError(
            f"--out {out} is the folder of a worker of run {theirs.run.id} with another contract "
            f"({theirs.digest[:12]}, now {contract.digest[:12]}): name another folder; --resume latest without --run "
            f"goes on with what is there"
        )


def _has_trained(out: Path) -> bool:
    return bool(checkpoints(out / "checkpoints")) or any((out / "roundlog").glob("*"))


def warn_of_earlier_life(out: Path, resume: str | None) -> None:
    """Where a worker begins a run anew in a folder that has seen one: hardly ever what its user wants.

    `--resume latest` is no mistake where there is nothing to resume: a service gives it at its first start too.
    """
    if not _has_trained(out):
        if resume is not None:
            logger.info("--resume %s: %s holds no checkpoint yet, this worker starts at round 0", resume, out)
        return
    found = checkpoints(out / "checkpoints")
    newest = f" (newest checkpoint: {found[-1].name})" if found else ""
    cure = (
        "--resume latest to a checkpoint"
        if found or resume is None
        else f"--resume {resume} finds a checkpoint where checkpoint.every_rounds is above 0"
    )
    logger.warning(
        "%s was a worker's folder before%s, and the run starts from the beginning all the same: --peers ADDRESS "
        "goes back to workers that go on with it, %s",
        out,
        newest,
        cure,
    )


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


def agree_on_contract(settings: Settings, swarm: Swarm, run_id: str | None) -> tuple[Settings, bool]:
    """Settings with the contract that this worker trains under: the swarm's, where it has one; and whether it has none.

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
        logger.info("run %s: contract %s, taken from the swarm", theirs.run.id, theirs.digest[:12])
        return settings.adopt(theirs), False
    if brings_contract:
        logger.info(
            "run %s: contract %s, brought by this worker", settings.contract.run.id, settings.contract.digest[:12]
        )
        warn_of_long_warmup(settings.contract)
        return settings, True
    runs = swarm.runs()
    named = f"run {run_id}" if run_id else "any run"
    others = f"; the swarm has runs {', '.join(runs)}" if runs else ""
    raise SwarmError(
        f"0 peers of {named}{others}: wait for a worker of the run to start, or start one here with --run RUN.toml"
    )
