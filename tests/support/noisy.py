"""Workers of the benchmarks, started as quickly as commands are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

from benchmarks import noise
from benchmarks.netns import NamespaceHost
from benchmarks.noise import NoiseWorker
from support.warm import Warm


class WarmWorker(NoiseWorker):
    """One whose imports are done; what it inherits counts in every run alike."""

    def __init__(self, *arguments: Any, warm: Warm, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._warm = warm

    def start(self, peers: Sequence[str]) -> None:
        self.popen = self._warm.start(
            [noise.__file__, *self._arguments, *peers],
            out=self._folder / "lines.jsonl",
            errors=self._folder / "errors.txt",
            namespace=self.host.path if isinstance(self.host, NamespaceHost) else None,
        )


class RunBenchmark(Protocol):
    """Runs a benchmark with --quick in this process; returns its lines."""

    def __call__(self, benchmark: ModuleType) -> list[dict[str, Any]]: ...


@pytest.fixture
def run_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm) -> RunBenchmark:
    def run(benchmark: ModuleType) -> list[dict[str, Any]]:
        if hasattr(benchmark, "NoiseWorker"):
            monkeypatch.setattr(benchmark, "NoiseWorker", partial(WarmWorker, warm=warm))
        out = tmp_path / "out.jsonl"
        assert vars(benchmark)["main"](["--quick", "--out", str(out)]) == 0
        lines = [dict(json.loads(line)) for line in out.read_text().splitlines()]
        assert all(line["commit"] and line["versions"]["hivemind"] for line in lines)
        return lines

    return run
