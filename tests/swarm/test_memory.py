"""How much memory a worker takes, as a multiple of its model (fp32): what docs/design.md says, whatever the round."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from support.noisy import WarmWorker

from benchmarks.links import Links
from benchmarks.noise import start_all, stop_all, wait_for_round

if TYPE_CHECKING:
    from support.warm import Warm

VALUES = 10_000_000
ROUNDS = 4
SAMPLE_S = 0.01


def own_bytes(pid: int) -> int:
    """Memory that a process has written to; libraries, of which more or less may be mapped, do not count."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(1024 * int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))


@contextmanager
def sampled(pid: int) -> Iterator[list[int]]:
    """What `own_bytes` is meanwhile."""
    found, over = [own_bytes(pid)], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            found.append(own_bytes(pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def peaks(folder: Path, warm: Warm, *, values: int, count: int) -> dict[str, int]:
    """Of one of `count` workers in some rounds."""
    folder.mkdir()
    links = Links()
    workers = [
        WarmWorker(folder / str(index), links.host(), warm=warm, values=values, workers=count, inner_s=0.1)
        for index in range(count)
    ]
    try:
        start_all(workers)
        first = wait_for_round(workers, count)
        trainer = workers[0].popen.pid
        below = psutil.Process(trainer).children(recursive=True)
        (network,) = (process.pid for process in below if process.cmdline()[1:3] == ["-m", "opendiloco.network"])
        with sampled(trainer) as of_trainer, sampled(network) as of_network:
            while wait_for_round(workers, count) < first + ROUNDS:
                pass
        return {"trainer": max(of_trainer), "network": max(of_network)}
    finally:
        stop_all(workers)
        links.close()


def test_peak_memory_is_the_documented_multiple_of_the_model(tmp_path: Path, warm: Warm) -> None:
    base = peaks(tmp_path / "base", warm, values=1000, count=1)
    large = peaks(tmp_path / "large", warm, values=VALUES, count=2)
    multiples = {name: (large[name] - base[name]) / (4 * VALUES) for name in base}
    assert 2.2 < multiples["network"] < 3.6  # of the shared vectors it uses the average, unless it gives chunks away
    assert 6.5 < multiples["trainer"] < 8.0  # SGD here; AdamW has two more
