"""What benchmarks share: guarded peer processes, pseudo-gradient-like values, facts about the machine, JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from opendiloco import guard

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CALL_LIMIT_S = 120.0
LOG_TAIL = 1 << 16
CLOSE_LIMIT_S = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUIET_LOOK_S, QUIET_SHARE = 0.3, 0.2
SEGMENT = 100_000
"""Values of one scale: about a parameter tensor."""
SCALES = (1e-2, 1e-3, 1e-4)
CHUNK = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchmarkError(Exception):
    """A peer process failed; the message holds the end of its log."""


def run_script(name: str, main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with what it returns; SIGINT and SIGTERM end it in order, with 130."""
    for number in STOP_SIGNALS:  # also where a shell had them ignored
        signal.signal(number, signal.default_int_handler)
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
        print("stopped: nothing was written", file=sys.stderr)
    except BenchmarkError as error:
        code = 1
        print(f"{name}: {error}", file=sys.stderr)
    sys.exit(code)


def parse_options(
    parser: argparse.ArgumentParser, name: str, argv: Sequence[str] | None, *, quick: Mapping[str, object]
) -> argparse.Namespace:
    """Parse `argv` with --quick and --out beside the parser's own options.

    What was measured with other options than the defaults goes elsewhere, so that the figures that the documents cite
    stay.

    Args:
        quick: other defaults, for a run that only shows that it works.
    """
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"JSON lines (default benchmarks/results/{name}.jsonl; with options that differ from the defaults "
        f"runs/bench/{name}.jsonl)",
    )
    usual, options = parser.parse_args([]), parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(argv)
    if options.out is None:
        options.out = (RESULTS if options == usual else ROOT / "runs" / "bench") / f"{name}.jsonl"
    return options


class PeerProcess:
    """A process that answers calls, under opendiloco's guard: whatever ends this process ends all that it started."""

    def __init__(self, module: str, *, threads: int, inherited: Iterable[int] = (), prefix: Sequence[str] = ()) -> None:
        """Run `python -m module DESCRIPTOR` with `threads` compute threads; its end of the socket is DESCRIPTOR.

        Args: `prefix` is put before the command, which stays one process (see `netns`).
        """
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), *inherited]
        environment = {
            guard.FDS_VARIABLE: ",".join(map(str, descriptors)),
            "HIVEMIND_MEMORY_SHARING_STRATEGY": "file_descriptor",  # leaves no files in /dev/shm
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        with theirs:
            self._guard = subprocess.Popen(
                guard.guard_command([*prefix, sys.executable, "-m", module, str(theirs.fileno())]),
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=descriptors,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the benchmark only
            )
        self._connection = Connection(ours.detach())

    def send(self, method: str, *arguments: object) -> None:
        """Begin a call; `receive` waits for its end."""
        with contextlib.suppress(OSError):  # `receive` says why
            self._connection.send((method, arguments))

    def receive(self, limit_s: float = CALL_LIMIT_S) -> Any:
        """The result of the call begun last, within `limit_s` seconds.

        Raises:
            BenchmarkError: the call failed, the process ended, or there is no answer in time.
        """
        try:
            if not self._connection.poll(limit_s):
                raise BenchmarkError(f"no answer after {limit_s:g} s:\n{self._log_tail()}")
            result, error = self._connection.recv()
        except (EOFError, OSError):
            raise BenchmarkError(f"a peer process ended:\n{self._log_tail()}") from None
        if error is not None:
            raise BenchmarkError(f"{error}\n{self._log_tail()}")
        return result

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of all processes of this peer, by kind."""
        used: dict[str, float] = defaultdict(float)
        for child in _children(self._guard.pid):
            _add_cpu(used, child, kind="trainer")
        return dict(used)

    def hang_up(self) -> None:
        """Ask the process to end in order; `close` waits for it."""
        self._connection.close()

    def close(self) -> None:
        """Wait until nothing of this peer is left, and make that so if it does not happen by itself."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(CLOSE_LIMIT_S)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        self._log.close()

    def _log_tail(self) -> str:
        end = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL, max(0, end - LOG_TAIL))
        return "\n".join(tail.decode(errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put SIGINT and SIGTERM off to the end of the block, which may begin or end what must not be left halfway."""
    came: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def answer_calls(connection: Connection, handler: object) -> None:
    """The other end of a `PeerProcess`: run methods of `handler` as asked until it hangs up."""
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        reply: tuple[Any, str | None]
        try:
            reply = (getattr(handler, method)(*arguments), None)
        except Exception as error:  # the benchmark decides what to do about it
            reply = (None, f"{method}: {type(error).__name__}: {error}")
        connection.send(reply)


# --- values -----------------------------------------------------------------------------------------------


def fill(values: Tensor, *, seed: int) -> None:
    """Gaussian values like a pseudo-gradient's: every tensor of the model has a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    for start, scale in zip(range(0, values.numel(), SEGMENT), itertools.cycle(SCALES), strict=False):
        values[start : start + SEGMENT].normal_(generator=generator).mul_(scale)


def exact_mean(vectors: Sequence[Tensor]) -> Tensor:
    """fp64 mean of fp32 vectors."""
    mean = vectors[0].double()
    for vector in vectors[1:]:
        mean += vector
    return mean.div_(len(vectors))


def compare(results: Sequence[Tensor], exact: Tensor) -> tuple[float, float]:
    """Relative error of the first result, and the largest difference between any two."""
    squares = difference = 0.0
    for start in range(0, exact.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        squares += float((results[0][chunk] - exact[chunk]).square().sum())
        stacked = torch.stack([result[chunk] for result in results])
        difference = max(difference, float((stacked.amax(0) - stacked.amin(0)).max()))
    return math.sqrt(squares) / float(exact.norm()), difference


# --- facts ------------------------------------------------------------------------------------------------


def _machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu(), "cores": cores(), "memory_gib": round(memory / 2**30)}


def cpu() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def busy_s() -> float:
    """CPU seconds that all cores of this machine have spent on anything since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S  # without idle, waiting for disks


def wait_until_quiet(limit_s: float) -> None:
    """Wait, at most `limit_s` seconds, for a moment in which the machine's cores are mostly idle."""
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        before = busy_s()
        time.sleep(QUIET_LOOK_S)
        if busy_s() - before < QUIET_SHARE * QUIET_LOOK_S * (os.cpu_count() or 1):
            return


def about() -> dict[str, object]:
    """What a result depends on: machine, versions, commit; and when it was."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "hivemind", "opendiloco-p2p")}
    return {
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
        "time": time.time(),
    }


def _commit() -> str:
    """Commit of the working tree, with `+changes` when there are any; `unknown` outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "opendiloco", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_lines(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Replace `path` by one JSON object a line, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("".join(json.dumps(record) + "\n" for record in records))
    beside.replace(path)


def cpu_of(pid: int) -> dict[str, float]:
    """CPU seconds so far of a worker's process and of those below it, by kind."""
    used: dict[str, float] = defaultdict(float)
    _add_cpu(used, pid, kind="trainer")
    return dict(used)


def _add_cpu(used: dict[str, float], pid: int, *, kind: str) -> None:
    """Add the CPU time of a process and of those below it, which has the kind `kind` unless its command tells."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = _children(pid)
    except OSError:
        return  # it has just ended
    if Path(os.fsdecode(command[0])).name == "p2pd":
        kind = "p2pd"
    elif b"opendiloco.network" in command:
        kind = "network process"
    used[kind] += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # user, system
    for child in children:
        _add_cpu(used, child, kind="helpers" if kind == "trainer" else kind)


def _children(pid: int) -> list[int]:
    """Direct children of all threads of a process."""
    lists = [Path(task, "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for text in lists for child in text.split()]
