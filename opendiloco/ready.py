"""Tells a service manager that a peer can be joined: systemd's protocol (sd_notify(3)), where somebody listens."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def tell_ready() -> None:
    """Say so to whoever started this process and asked for it; a manager that cannot be told is no reason to end."""
    path = os.environ.get(VARIABLE, "")
    if path[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\0" + path[1:] if path[0] == "@" else path)
        channel.send(b"READY=1")
