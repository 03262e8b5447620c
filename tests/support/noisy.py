"""Workers of the benchmarks, started as quickly as commands are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import noise
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
        )
