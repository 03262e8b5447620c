"""Workers for benchmarks of the network: processes with a `DiLoCo` optimizer that trains on noise, behind links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

import psutil

from benchmarks.common import BenchmarkError
from opendiloco.processes import leave_with

LIMIT_S = 120.0
POLL_S = 0.05
QUICK_S = 0.2


class Host(Protocol):
    """Where a worker runs; see `links` and `netns`."""

    @property
    def prefix(self) -> list[str]:
        """What runs a command there, when put before it."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings `swarm.*` of the peer there."""

    @property
    def carried_bytes(self) -> int:
        """By its link so far, both ways."""


def work(
    folder: Path,
    values: int,
    workers: int,
    inner_s: float,
    quick_rounds: int,
    codec: str,
    host: dict[str, Any],
    peers: list[str],
) -> None:
    """Train for ever; a line of JSON per attempt at a round goes to standard output."""
    import torch

    from opendiloco import Contract, DiLoCo, InnerConfig, RoundReport, RoundsConfig, RunConfig, Swarm, SwarmConfig
    from opendiloco.config import OuterConfig
    from opendiloco.rounds import Recovery

    torch.set_num_threads(1)
    contract = Contract(
        run=RunConfig(id="noise", rounds=1_000_000),
        inner=InnerConfig(steps=10),
        outer=OuterConfig.model_validate({"codec": codec}),
        rounds=RoundsConfig(start_peers=workers),
    )
    model = torch.nn.Linear(1000, values // 1000, bias=False)
    torch.nn.init.zeros_(model.weight)

    def tell(report: RoundReport) -> None:
        outcome = report.outcome
        print(
            json.dumps(
                {
                    "round": report.round,
                    "verdict": outcome.verdict,
                    "reason": outcome.reason,
                    "digest": outcome.digest,
                    "time": time.time(),
                    "participants": sorted(outcome.weights),
                    "inner_s": report.inner_s,
                    "wait_s": outcome.wait_s,
                    "rendezvous_s": outcome.rendezvous_s,
                    "params_hash": report.params_hash.result() if report.params_hash is not None else None,
                    "allreduce_s": outcome.allreduce_s,
                }
            ),
            flush=True,
        )

    def tell_way(verdict: str, recovery: Recovery, **more: Any) -> None:
        line = {
            "round": recovery.position.round,
            "verdict": verdict,
            "time": time.time(),
            "recovery_s": recovery.seconds,
            "received_bytes": recovery.received_bytes,
            "full_state": recovery.full_state,
            "replayed": recovery.rounds_replayed,
            "donors": len(recovery.donors),
        }
        print(json.dumps(line | more), flush=True)

    with Swarm(SwarmConfig(peers=tuple(peers), **host), folder) as swarm:
        swarm.open()
        (folder / "addresses").write_text("\n".join(swarm.addresses))
        started = time.monotonic()
        optimizer = DiLoCo(
            torch.optim.SGD(model.parameters(), lr=1e-3),
            model,
            swarm,
            contract,
            on_round=tell,
            on_catch_up=lambda recovery: tell_way("catch_up", recovery),
        )
        tell_way("join", optimizer.recovery, peer=swarm.peer_id, seconds=time.monotonic() - started)
        while True:
            phase_s = inner_s if optimizer.round >= quick_rounds else min(inner_s, QUICK_S)
            time.sleep(phase_s / contract.inner.steps)
            model.weight.grad = torch.randn_like(model.weight)
            optimizer.step()


class NoiseWorker:
    """One worker over all its lives, as a benchmark sees it."""

    def __init__(
        self,
        folder: Path,
        host: Host,
        *,
        values: int,
        workers: int,
        inner_s: float,
        quick_rounds: int = 0,
        codec: str = "int8",
    ) -> None:
        """Args: `workers` of the run's start; `inner_s` seconds of an inner phase, after some quick ones."""
        self.host, self._folder = host, folder
        self._arguments = [
            *map(str, (folder, values, workers, inner_s, quick_rounds)),
            codec,
            json.dumps(host.settings),
        ]
        folder.mkdir()

    def start(self, peers: Sequence[str]) -> None:
        """Start its process, again with its old key and address."""
        with (self._folder / "lines.jsonl").open("wb") as out, (self._folder / "errors.txt").open("ab") as errors:
            self.popen = subprocess.Popen(
                [*self.host.prefix, sys.executable, __file__, *self._arguments, *peers],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
                preexec_fn=partial(leave_with, os.getpid()),
            )

    @property
    def addresses(self) -> list[str]:
        path = self._folder / "addresses"
        return path.read_text().split() if path.exists() else []

    def lines(self) -> list[dict[str, Any]]:
        """What it has said in this life."""
        if self.popen.poll() is not None:
            raise BenchmarkError(f"{self._folder.name} ended: {(self._folder / 'errors.txt').read_text()[-500:]}")
        text = (self._folder / "lines.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def commits(self) -> dict[int, dict[str, Any]]:
        """Its rounds in this life."""
        return {line["round"]: line for line in self.lines() if line["verdict"] == "commit"}

    def joined(self) -> dict[str, Any] | None:
        """How it joined, once it has; `seconds` until it could train, `recovery_s` of it to get the state."""
        return next((line for line in self.lines() if line["verdict"] == "join"), None)

    def catch_ups(self) -> list[dict[str, Any]]:
        """Its ways to where the swarm was, each after a resync."""
        return [line for line in self.lines() if line["verdict"] == "catch_up"]

    def peak_bytes(self) -> dict[str, int]:
        """The most resident memory so far of its trainer and of its network process."""
        below = psutil.Process(self.popen.pid).children(recursive=True)
        (network,) = (process for process in below if process.cmdline()[1:3] == ["-m", "opendiloco.network"])
        return {name: _peak(pid) for name, pid in (("trainer", self.popen.pid), ("network", network.pid))}


def start_all(workers: Sequence[NoiseWorker]) -> None:
    """Start the first one by itself, the others through it."""
    workers[0].start([])
    while not workers[0].addresses:
        workers[0].lines()
        time.sleep(0.1)
    for worker in workers[1:]:
        worker.start(workers[0].addresses)


def stop_all(workers: Sequence[NoiseWorker]) -> None:
    """End all that were started, and wait until their guards have cleaned up."""
    running = [worker.popen for worker in workers if hasattr(worker, "popen") and worker.popen.poll() is None]
    below = [process for popen in running for process in psutil.Process(popen.pid).children(recursive=True)]
    for popen in running:
        popen.terminate()
    for popen in running:
        popen.wait()
    psutil.wait_procs(below, timeout=LIMIT_S)


def wait_for_round(workers: Sequence[NoiseWorker], participants: int, *, limit_s: float = LIMIT_S) -> int:
    """Wait until all of them have committed one new round with so many participants; returns it."""
    before = max(max(worker.commits(), default=0) for worker in workers)
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if max(workers[0].commits(), default=0) <= before:  # asking all of them would keep a core busy
            time.sleep(POLL_S)
            continue
        commits = [worker.commits() for worker in workers]
        for round in sorted(set.intersection(*(set(of_worker) for of_worker in commits)) - set(range(before + 1))):
            if all(len(of_worker[round]["participants"]) == participants for of_worker in commits):
                return round
        time.sleep(POLL_S)
    raise BenchmarkError(f"no round of {participants} workers within {limit_s:g} s")


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    folder, values, workers, inner_s, quick_rounds, codec, host, *peers = sys.argv[1:]
    work(Path(folder), int(values), int(workers), float(inner_s), int(quick_rounds), codec, json.loads(host), peers)
