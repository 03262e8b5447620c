"""The file through which a peer's addresses get to others: one a line, there once the peer can be joined."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from opendiloco.errors import SettingsError
from opendiloco.ready import tell_ready


class AddressFiles:
    """The files of one peer: none is there while it cannot be joined, neither before `write` nor after the block."""

    def __init__(self, *paths: Path | None) -> None:
        """Raises SettingsError where one cannot be written."""
        self._paths = [path for path in paths if path is not None]
        for path in self._paths:
            check_address_file(path)

    def write(self, addresses: list[str]) -> None:
        """This peer can be joined from now on, which a service manager hears as well."""
        for path in self._paths:
            write_addresses(path, addresses)
        tell_ready()

    def __enter__(self) -> Self:
        for path in self._paths:
            forget_addresses(path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for path in self._paths:
            with contextlib.suppress(SettingsError):
                forget_addresses(path)


def check_address_file(path: Path | None) -> None:
    """Raise SettingsError where such a file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(None, f"{path.parent} is not writable")
    except OSError as error:
        raise _unwritable(path, error) from None


def forget_addresses(path: Path | None) -> None:
    """Remove the file of an earlier start: others wait for the new one."""
    if path is None:
        return
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_addresses(path: Path | None, addresses: list[str]) -> None:
    """Write addresses one a line, complete or not at all; others wait for this file."""
    if path is None:
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text("".join(f"{address}\n" for address in addresses))
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"the file for this peer's addresses, {path}, cannot be written ({error.strerror}): name another one "
        "(--address-file, --out)"
    )
