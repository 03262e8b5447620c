"""`opendiloco monitor`: join as a peer that only reads the DHT, then print one snapshot, or keep showing."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from opendiloco.config import SwarmConfig
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.leave import Leave, ends_in_order, hang_up
from opendiloco.logs import setup_logging
from opendiloco.monitor.archive import Archive
from opendiloco.monitor.board import Board
from opendiloco.monitor.snapshot import Snapshot
from opendiloco.monitor.terminal import View
from opendiloco.monitor.watch import LOOK_S, Watch
from opendiloco.monitor.web import listen, serve
from opendiloco.peer import Peer

POLL_S = 0.5
INTERRUPTED = 130


def run_monitor(config: SwarmConfig, *, run_id: str | None, as_json: bool, web: str | None, out: Path | None) -> int:
    """Watch a run until SIGINT, SIGTERM or SIGHUP, or once; returns the exit code: 130 if it ends before that once.

    Args:
        run_id: None: the only one that there is.
        as_json: print one snapshot and end.
        web: PORT or HOST:PORT of the page; None: show in the terminal.
        out: folder that keeps the history, to which one snapshot adds, too.

    Raises:
        SettingsError: no peers, several runs, a port or folder that cannot be used.
        SwarmError: none of the peers answers, the run does not appear in time (`as_json`), or the network process ends.
    """
    if not config.peers:
        raise SettingsError(
            "swarm.peers is empty: name a peer of the swarm to look at, with --peers ADDRESS (workers and bootstrap "
            "peers write theirs with --address-file)"
        )
    stop, shown = threading.Event(), None
    numbers = (signal.SIGINT, signal.SIGTERM, *hang_up())
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    observer = config.model_copy(update={"client_mode": True, "identity": ""})  # it stores nothing for others
    with contextlib.ExitStack() as stack:
        for number, handler in previous.items():
            stack.callback(signal.signal, number, handler)
        stack.enter_context(setup_logging(None, console=True))
        listener = stack.enter_context(contextlib.closing(listen(web))) if web is not None else None
        archive = stack.enter_context(contextlib.closing(Archive(out)))
        stack.enter_context(ends_in_order(stop.is_set))
        onlooker = stack.enter_context(Peer(observer, None, leaving=stop.is_set))
        onlooker.open()
        watch = Watch(onlooker, run_id)
        if as_json:
            shown = _first(watch, config.startup_timeout_s, run_id, stop)
            print(json.dumps(shown.to_json()), flush=True)
            archive.take(watch.workers, shown)
        elif listener is not None:
            board = Board(archive)
            serve(listener, board, partial(keep_looking, watch, onlooker, stop, show=partial(_take, board, watch)))
        else:
            _show_in_terminal(watch, archive, onlooker, stop)
    return INTERRUPTED if as_json and shown is None else 0


def _take(board: Board, watch: Watch, shown: Snapshot) -> None:
    board.take(watch.workers, shown)


def _first(watch: Watch, limit_s: float, run_id: str | None, stop: threading.Event) -> Snapshot:
    give_up = time.monotonic() + limit_s
    while watch.find() is None:
        if time.monotonic() > give_up:
            what = f"run {run_id}" if run_id else "run"
            raise SwarmError(f"no {what} has appeared on this swarm within {limit_s:g} s (swarm.startup_timeout_s)")
        if stop.wait(POLL_S):
            raise Leave
    return watch.look()


def _show_in_terminal(watch: Watch, archive: Archive, onlooker: Peer, stop: threading.Event) -> None:
    """The newest snapshot in place, or one below the other where the output is no terminal."""
    console = Console()

    def show(shown: Snapshot) -> None:
        archive.take(watch.workers, shown)
        if console.is_terminal:
            live.update(View(shown, is_cropped=True), refresh=True)
        else:
            console.print(View(shown))

    with Live(Text("looking for the run ..."), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        keep_looking(watch, onlooker, stop, show=show)


def keep_looking(watch: Watch, onlooker: Peer, stop: threading.Event, *, show: Callable[[Snapshot], None]) -> None:
    """Look every few seconds until `stop`, and hand what was seen to `show`."""
    found = False
    while not stop.is_set():
        onlooker.check()
        found = found or watch.find() is not None
        if found:
            show(watch.look())
        stop.wait(LOOK_S)
