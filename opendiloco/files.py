"""The files that data.source stands for."""

from __future__ import annotations

import contextlib
import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from opendiloco.config import DataConfig
from opendiloco.errors import SettingsError

SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
    "parquet": (".parquet",),
}
"""Of the files of a folder, by scheme; other schemes take all."""
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def stdlib_files() -> list[Path]:
    """The source text of Python's standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = list[Path]()
    for folder, folders, names in os.walk(root):  # not into what is skipped, which may be far more than the library
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise SettingsError(f"data.source is stdlib, but {root} has no .py files: use text:PATH")
    return sorted(files)


def source_files(data: DataConfig, place: str, *, suffixes: tuple[str, ...]) -> list[Path]:
    """The files a path, folder or glob stands for, sorted; hidden ones of a folder are left out.

    Raises:
        SettingsError: there are none, or they may not be read.
    """
    path = Path(place).expanduser()
    with named(data):
        if path.is_file():
            return [path]
        if path.is_dir():
            os.listdir(path)  # where that is not allowed, the next line would find nothing and be content
            inside = (f for f in path.rglob("*") if not any(p.startswith(".") for p in f.relative_to(path).parts))
            files = [f for f in inside if f.is_file() and (not suffixes or f.name.endswith(suffixes))]
            if not files:
                kinds = " or ".join(suffixes) or "text"
                raise SettingsError(
                    f"data.source is {data.source}, but that folder has no {kinds} files: name one that has"
                )
            return sorted(files)
        files = [f for f in map(Path, glob.glob(str(path), recursive=True)) if f.is_file()]
    if not files:
        raise SettingsError(f"data.source is {data.source}, but there is no such file: correct the path")
    return sorted(files)


@contextlib.contextmanager
def named(data: DataConfig) -> Iterator[None]:
    """What the system says about a file, such as one that may not be read, as a line about data.source."""
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"data.source {data.source} cannot be read: {error.filename}: {error.strerror}: correct the path, or let "
            "this user read it"
        ) from None
