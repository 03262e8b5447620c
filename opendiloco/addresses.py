"""The file through which a peer's addresses get to others: one a line, there once the peer can be joined."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def forget_addresses(path: Path | None) -> None:
    """Remove the file of an earlier start: others wait for the new one."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def write_addresses(path: Path | None, addresses: list[str]) -> None:
    """Write addresses one a line, complete or not at all; others wait for this file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("".join(f"{address}\n" for address in addresses))
    beside.replace(path)
