"""How well does a swarm learn: DiLoCo against data parallel, H, k, kinds of text, outer optimizers, losses, codecs?

Small models on the standard library's source text, all workers of a run in one process (`opendiloco.simulate`). Every
cell and seed is a line of the results as soon as it is done; what is there already is not measured again, so that a
run can be stopped and goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.common import PeerProcess, about, parse_options, run_script
from benchmarks.quality import CELLS, GROUPS, QUICK, Size, cells_of
from benchmarks.quality_tables import group_report

LOOK_S = 0.5  # at a cell that runs, at a time
QUICK_GROUPS = ("time", "losses", "over-time")


class Results:
    """The lines of a file, which grows by one with every cell that is done."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, cell: str, seed: int, size: Size) -> bool:
        """Whether that cell has been measured, as it is defined now."""
        key = _key(cell, seed, size)
        return any({name: record.get(name) for name in key} == key for record in self.records)

    def add(self, cell: str, seed: int, size: Size, found: dict[str, Any]) -> None:
        """Write what came out."""
        record = {"benchmark": "quality", **_key(cell, seed, size), **found, **about()}
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self.records.append(record)


def _key(cell: str, seed: int, size: Size) -> dict[str, Any]:
    key = {"cell": cell, "seed": seed, "settings": asdict(CELLS[cell]), "size": asdict(size)}
    return dict(json.loads(json.dumps(key)))


def measure(todo: Sequence[tuple[str, int]], size: Size, results: Results, *, jobs: int) -> None:
    """Run cells, so many at a time.

    Raises:
        BenchmarkError: one has failed.
    """
    waiting, stopped = queue.SimpleQueue[tuple[str, int]](), threading.Event()
    for each in todo:
        waiting.put(each)

    def work() -> None:
        with contextlib.closing(PeerProcess("benchmarks.quality_cell", threads=1)) as process:
            while not stopped.is_set():
                try:
                    cell, seed = waiting.get_nowait()
                except queue.Empty:
                    return
                process.send("start", cell, seed, asdict(size))
                process.receive()
                found = None
                while found is None and not stopped.is_set():
                    process.send("wait", LOOK_S)
                    found = process.receive()
                if found is not None:
                    results.add(cell, seed, size, found)
                    print(f"{cell}, seed {seed}: loss {found['loss']:.4f} in {found['seconds']:.1f} s", flush=True)

    with ThreadPoolExecutor(jobs) as threads:
        futures = [threads.submit(work) for _ in range(min(jobs, len(todo)))]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()
    for future in done:
        future.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, and print the tables of the groups."""
    parser = argparse.ArgumentParser(prog="launch.sh bench quality", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cells at a time, a core each (default 2)")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--steps", type=int, metavar="N", help=f"inner steps of a run (default {Size.steps})")
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is there")
    options = parse_options(parser, "quality", argv, quick={"seeds": 1, "only": list(QUICK_GROUPS), "steps": 8})
    size = QUICK if options.quick else Size()
    size = replace(size, steps=options.steps or size.steps)
    groups, results = options.only or list(GROUPS), Results(options.out)
    cells = cells_of(groups)
    todo = [(cell, seed) for seed in range(options.seeds) for cell in cells if not results.has(cell, seed, size)]
    if not options.show and todo:
        try:
            measure(todo, size, results, jobs=options.jobs)
        except KeyboardInterrupt:
            print(f"stopped: what is done is in {options.out}, the same command goes on from there", file=sys.stderr)
            return 130
    records = [record for record in results.records if record["size"] == asdict(size)]
    for name in groups:
        print(f"\n## {GROUPS[name].question}\n\n{group_report(records, name)}")
    return 0


if __name__ == "__main__":
    run_script("bench_quality", main)
