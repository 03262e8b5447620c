"""The state before another one is written over it, chunk by chunk, for the case that the other one never gets whole.

It is kept in a file without a name, which the system may write to disk instead of holding it in memory, and which ends
with whoever has it open.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Spare:
    """What was in some vectors of equal length, as far as it is about to be written over."""

    def __init__(self, vectors: Sequence[Tensor], folder: Path) -> None:
        """Args: `vectors` are fp32, `folder` is where the file is made."""
        self._vectors, self._folder = [vector for vector in vectors if vector.numel()], folder
        self._kept: dict[int, slice] = {}
        self._file: IO[bytes] | None = None
        self._is_lost = False

    def keep(self, chunk: slice) -> None:
        """To be called before a chunk is written over, the first time and any other.

        Where there is no room the log says so, and there is nothing to go back to.
        """
        if chunk.start in self._kept or self._is_lost:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - lives as long as this object
            for vector in self._vectors:
                self._file.write(vector[chunk].numpy().data)
        except OSError as error:
            self._is_lost = True
            self.close()
            logger.warning(
                "this worker's own state cannot be kept in %s while it fetches the swarm's: %s: make room",
                self._folder,
                error.strerror,
            )
            return
        self._kept[chunk.start] = chunk

    def restore(self) -> bool:
        """Put everything back, once; False where that is lost."""
        if self._is_lost:
            return False
        if self._file is not None:
            self._file.seek(0)
            for chunk in self._kept.values():
                for vector in self._vectors:
                    part = vector[chunk]
                    part.copy_(torch.frombuffer(bytearray(self._file.read(4 * part.numel())), dtype=torch.float32))
        self.close()
        return True

    def close(self) -> None:
        """Forget it."""
        if self._file is not None:
            self._file.close()
            self._file = None
