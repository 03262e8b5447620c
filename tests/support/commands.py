"""`opendiloco` commands as processes, in folders of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from benchmarks.netns import NamespaceHost
from opendiloco.config import Contract, DataConfig, InnerConfig, ModelConfig, OuterConfig, RoundsConfig, RunConfig
from opendiloco.metrics import read_metrics
from opendiloco.settings import write_toml
from support.forking import NETWORK
from support.waiting import LIMIT_S
from support.warm import Forked, Warm


class Command:
    """A running `opendiloco` command with a folder of its own."""

    popen: Forked | subprocess.Popen[bytes]

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        warm: Warm,
        *,
        is_told: bool = True,
        host: NamespaceHost | None = None,
    ) -> None:
        """Args: `is_told` of its folder; else only its output is written there. `host` is where it runs."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, arguments = folder, [*arguments, *(["--out", str(folder)] if is_told else [])]
        if os.environ.get("PYTHONPATH") == warm.python_path:
            self.popen = warm.start(
                ["-m", "opendiloco", *arguments],
                out=folder / "stdout.txt",
                errors=folder / "stderr.txt",
                namespace=host.path if host is not None else None,
            )
            return
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "opendiloco", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def errors(self) -> str:
        """What it wrote on stderr."""
        return (self.folder / "stderr.txt").read_text()

    @property
    def complaint(self) -> str:
        """The one line that says why it ended; fails when there is a traceback or another line like it."""
        lines = [line for line in self.errors.splitlines() if line.startswith("opendiloco: ")]
        assert len(lines) == 1, self.errors
        assert "Traceback" not in self.errors
        return lines[0]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far, of one kind."""
        path = self.folder / "metrics.jsonl"
        events = read_metrics(path) if path.exists() else []
        return [event for event in events if kind in (None, event["event"])]

    def below(self) -> list[psutil.Process]:
        """Its guard, its network process and libp2p's daemon."""
        return psutil.Process(self.popen.pid).children(recursive=True)

    def network_process(self) -> psutil.Process:
        """The one that runs opendiloco.network."""
        (found,) = (p for p in self.below() if NETWORK.startswith(p.name()) or NETWORK in p.cmdline())
        return found

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Exit code; fails with what the command printed when it does not end in time."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.folder.name} still runs after {limit_s:g} s: {self.errors}")


class Commands:
    """Starts `opendiloco` commands, and ends those that still run."""

    def __init__(self, root: Path, text_file: Path, warm: Warm) -> None:
        self._root, self._text_file, self._warm = root, text_file, warm
        self._started: list[Command] = []

    def start(
        self, *arguments: str, folder: Path | None = None, is_told: bool = True, host: NamespaceHost | None = None
    ) -> Command:
        """Run `opendiloco ARGUMENTS`, in a new folder or on in an old one; see `Command`."""
        folder = folder or self._root / f"command-{len(self._started)}"
        command = Command(folder, arguments, self._warm, is_told=is_told, host=host)
        self._started.append(command)
        return command

    def worker(
        self,
        peers: Sequence[str] = (),
        contract: Contract | None = None,
        *,
        sets: Sequence[str] = (),
        folder: Path | None = None,
        host: NamespaceHost | None = None,
    ) -> Command:
        """`opendiloco train`; a worker without a contract takes the swarm's."""
        arguments = ["train", "--set", "compute.threads=1", "--set", "log.every_steps=1"]
        arguments += [part for override in sets for part in ("--set", override)]
        if peers:
            arguments += ["--peers", *peers]
        if contract is not None:
            run_toml = self._root / f"{contract.digest}.toml"
            write_toml(run_toml, contract)
            arguments += ["--run", str(run_toml)]
        return self.start(*arguments, folder=folder, host=host)

    def contract(
        self, *, rounds: int = 5, codec: str = "int8", weighting: str = "uniform", **settings: Any
    ) -> Contract:
        """A run that takes seconds; `settings` are those of `rounds`."""
        return small_contract(self._text_file, rounds=rounds, codec=codec, weighting=weighting, **settings)

    def close(self) -> None:
        running = [command for command in self._started if command.popen.poll() is None]
        helpers = [process for command in running for process in command.below()]
        for command in running:
            command.popen.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + 10
        for command in running:
            try:
                command.popen.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                command.popen.kill()
                command.popen.wait()
        psutil.wait_procs(helpers, timeout=20)


def small_contract(
    text_file: Path,
    *,
    run: str = "test",
    rounds: int = 5,
    codec: str = "int8",
    weighting: str = "uniform",
    **settings: Any,
) -> Contract:
    """A tiny model, a small text and three inner steps a round."""
    return Contract(
        run=RunConfig(id=run, rounds=rounds),
        model=ModelConfig(name="tiny"),
        data=DataConfig(source=f"text:{text_file}", seq_len=32, validation_sequences=4),
        inner=InnerConfig(steps=3, batch_size=2),
        outer=OuterConfig.model_validate({"codec": codec, "weighting": weighting}),
        rounds=RoundsConfig(**settings),
    )


class SmallContract(Protocol):
    def __call__(self, *, run: str = "test") -> Contract: ...


@pytest.fixture
def make_contract(text_file: Path) -> SmallContract:
    """Makes run contracts of workers that train for seconds."""
    return partial(small_contract, text_file)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text to train on: a few thousand words out of ten, so that a model learns something at once."""
    words = ["peer", "swarm", "round", "step", "worker", "model", "loss", "group", "leader", "codec"]
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(" ".join(draw.choices(words, k=12)) + "\n" for _ in range(400)))
    return path


@pytest.fixture
def commands(tmp_path: Path, text_file: Path, warm: Warm) -> Iterator[Commands]:
    commands = Commands(tmp_path, text_file, warm)
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def module_commands(tmp_path_factory: pytest.TempPathFactory, text_file: Path, warm: Warm) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"), text_file, warm)
    yield commands
    commands.close()
