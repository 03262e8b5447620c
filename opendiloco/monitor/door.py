"""Who may look at the page: its address, and which requests are turned away. Pure.

A browser sends requests for any site that it shows. One that is not this page's must neither read it, which a name of
its own for this machine would let it (DNS rebinding), nor make it work.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from opendiloco.errors import SettingsError

LOOPBACK = "127.0.0.1"


def parse_address(text: str) -> tuple[str, int]:
    """`PORT` or `HOST:PORT`; without a host only this machine can look.

    Raises:
        SettingsError: neither.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535) or (colon and not host):
        raise SettingsError(f"--web is {text}: give PORT or HOST:PORT with a port from 0 to 65535, such as 8080")
    return host.strip("[]") or LOOPBACK, int(port)


def is_loopback(host: str) -> bool:
    """Whether it is an address of this machine that only this machine reaches."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def refusal(path: str, headers: Mapping[str, str], *, local_name: str | None) -> tuple[int, str] | None:
    """Status and words for a request that is not answered, or None.

    Args:
        headers: by their names in small letters.
        local_name: the host's as whoever started the server gave it, where only this machine can look; else None.
    """
    host = headers.get("host", "")
    if local_name is not None and not _is_local(_name_of(host), local_name):
        return 400, "this page is for this machine only: use the address that the monitor prints"
    if path == "/":  # links to the page are for everybody
        return None
    is_foreign = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    origin = headers.get("origin")
    if is_foreign or (origin is not None and origin.partition("://")[2] != host):
        return 403, "this is for the monitor's own page"
    return None


def _name_of(host: str) -> str:
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def _is_local(name: str, local_name: str) -> bool:
    return name in ("localhost", local_name.lower()) or is_loopback(name)
