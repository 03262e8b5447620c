"""The page: a small server of this machine's own, which needs nothing from other hosts. Extra: `monitor`.

What comes from other peers goes out as JSON and becomes text in the page, never markup.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opendiloco.errors import SettingsError, pip_install
from opendiloco.monitor.history import History
from opendiloco.monitor.sights import Sight
from opendiloco.monitor.snapshot import Snapshot

PAGE = Path(__file__).with_name("page")
FILES = {"page.css": "text/css", "page.js": "text/javascript", "charts.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",  # plotly sets styles of its own
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PING_S = 15.0


class Board:
    """The newest snapshot and the history, for any number of browsers. Methods may be called from any thread."""

    def __init__(self, history: History) -> None:
        self._history, self._lock = history, threading.Lock()
        self._life = secrets.token_hex(8)
        self.is_closed = False
        self._snapshot: dict[str, Any] | None = None
        self._changed: set[Callable[[], None]] = set()

    def take(self, workers: Mapping[str, Sight], snapshot: Snapshot) -> None:
        """What a look has found."""
        with self._lock:
            self._history.look(workers, snapshot.time)
            self._snapshot = snapshot.to_json()
            for call in self._changed:
                call()

    def close(self) -> None:
        """Nothing more comes: whoever follows is let go."""
        with self._lock:
            self.is_closed = True
            for call in self._changed:
                call()

    def news(self, since: int) -> dict[str, Any]:
        """The newest snapshot, and the events after the first `since`; `life` says whose count that is."""
        with self._lock:
            events = self._history.since(since)
            return {"life": self._life, "snapshot": self._snapshot, "count": self._history.count, "events": events}

    @contextlib.contextmanager
    def following(self, call: Callable[[], None]) -> Iterator[None]:
        """In the block `call` is called after each new snapshot."""
        with self._lock:
            self._changed.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._changed.discard(call)


def parse_address(text: str) -> tuple[str, int]:
    """`PORT` or `HOST:PORT`; without a host only this machine can look.

    Raises:
        SettingsError: neither.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535) or (colon and not host):
        raise SettingsError(f"--web is {text}: give PORT or HOST:PORT with a port from 0 to 65535, such as 8080")
    return host.strip("[]") or LOOPBACK[0], int(port)


def serve(address: str, board: Board, watch: Callable[[], None], *, stop: threading.Event) -> None:
    """Serve the page until `watch`, which runs in this thread, returns; `stop` ends it then, too.

    Raises:
        SettingsError: the extra is not installed, or the address is not this machine's or taken.
    """
    try:
        import plotly  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise SettingsError(
            f"--web needs packages that are not there: {pip_install('starlette', 'uvicorn', 'plotly')}"
        ) from None
    host, port = parse_address(address)
    listener = _listen(host, port)
    with contextlib.closing(listener):
        config = uvicorn.Config(
            make_app(board, local=host in LOOPBACK),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="web page", daemon=True)
        thread.start()
        shown = f"[{host}]" if ":" in host else host
        print(
            f"http://{shown}:{listener.getsockname()[1]}/ shows the swarm; Ctrl-C ends it", file=sys.stderr, flush=True
        )
        try:
            watch()
        finally:
            stop.set()
            board.close()
            server.should_exit = True
            thread.join(5.0)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(16)  # whoever comes before the server is up waits
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(
            f"--web {host}:{port}: {reason}: choose another port, or an address of this machine"
        ) from None
    return listener


def make_app(board: Board, *, local: bool) -> Any:
    """The routes. `local`: only requests for this machine's own names are answered."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    def page(request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=HEADERS)

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return Response(status_code=404)
        return Response((PAGE / name).read_bytes(), media_type=FILES[name], headers=HEADERS)

    def plotly(request: Request) -> Response:
        headers = {**HEADERS, "Cache-Control": "max-age=86400"}
        return Response(plotly_script(), media_type="text/javascript", headers=headers)

    def news(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isdecimal() or len(since) > 18:
            return Response(status_code=400)
        return JSONResponse(board.news(int(since)), headers=HEADERS)

    async def stream(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isdecimal() or len(since) > 18:
            return Response(status_code=400)
        return StreamingResponse(_stream(board, int(since)), media_type="text/event-stream", headers=HEADERS)

    routes = [
        Route("/", page),
        Route("/plotly.js", plotly),
        Route("/api/news", news),
        Route("/api/stream", stream),
        Route("/{name}", file),
    ]
    hosts = [*LOOPBACK, "[::1]"] if local else ["*"]  # others' pages cannot read this one under a name of theirs
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


async def _stream(board: Board, since: int) -> AsyncIterator[bytes]:
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    with board.following(wake):
        while not board.is_closed:
            news = board.news(since)
            since = news["count"]
            yield f"data: {json.dumps(news)}\n\n".encode()
            try:
                await asyncio.wait_for(changed.wait(), PING_S)
            except TimeoutError:
                yield b": still here\n\n"
            changed.clear()


def plotly_script() -> bytes:
    """plotly.js, as the package brings it."""
    import importlib.resources

    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
