"""The page: a small server of this machine's own, which needs nothing from other hosts. Extra: `monitor`.

What comes from other peers goes out as JSON and becomes text in the page, never markup.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import importlib.util
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendiloco.errors import SettingsError, pip_install
from opendiloco.monitor.board import Board
from opendiloco.monitor.door import is_loopback, parse_address, refusal

PAGE = Path(__file__).with_name("page")
FILES = {"page.css": "text/css", "page.js": "text/javascript", "charts.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",  # plotly sets styles of its own
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PING_S = 15.0
PACKAGES = ("starlette", "uvicorn", "plotly")
MAX_STREAMS = 32
"""Browsers that follow at the same time."""
MAX_CONNECTIONS = 128

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class Listener:
    """Where browsers come in."""

    host: str
    """As it was given."""
    socket: socket.socket

    @property
    def url(self) -> str:
        """Of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.socket.getsockname()[1]}/"

    def close(self) -> None:
        """Nobody comes in any more."""
        self.socket.close()


def listen(address: str) -> Listener:
    """Take `PORT` or `HOST:PORT`; browsers that come before the page is served wait.

    Raises:
        SettingsError: the extra is not installed, or the address is not this machine's or taken.
    """
    host, port = parse_address(address)
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        raise SettingsError(f"--web needs packages that are not there: {pip_install(*PACKAGES)}")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(16)
    except (OSError, TypeError, ValueError) as error:  # of a host that no name server would take, too
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(
            f"--web {host}:{port}: {reason}: choose another port, or an address of this machine"
        ) from None
    return Listener(host, listener)


def serve(listener: Listener, board: Board, watch: Callable[[], None]) -> None:
    """Serve the page until `watch`, which runs in this thread, is over."""
    import uvicorn

    is_local = is_loopback(listener.socket.getsockname()[0])
    config = uvicorn.Config(
        make_app(board, local_name=listener.host if is_local else None),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        limit_concurrency=MAX_CONNECTIONS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener.socket])), name="web page", daemon=True)
    thread.start()
    print(f"{listener.url} shows the swarm; Ctrl-C ends it", file=sys.stderr, flush=True)
    try:
        watch()
    finally:
        board.close()
        server.should_exit = True
        thread.join(5.0)


def make_app(board: Board, *, local_name: str | None) -> Any:
    """The routes. `local_name`: see `door.refusal`."""
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
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
        if (since := _since(request)) is None:
            return Response(status_code=400)
        _, piece = next(board.news(since))
        return Response(piece, media_type="application/json", headers=HEADERS)

    class Door:
        """Turns away what `refusal` names."""

        def __init__(self, app: Asgi) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            app = self._app
            if scope["type"] == "http":
                headers = Headers(scope=scope)
                if (no := refusal(scope["path"], headers, local_name=local_name)) is not None:
                    app = PlainTextResponse(f"{no[1]}\n", status_code=no[0], headers=HEADERS)
            await app(scope, receive, send)

    routes = [
        Route("/", page),
        Route("/plotly.js", plotly),
        Route("/api/news", news),
        Route("/api/stream", Streams(board)),
        Route("/{name}", file),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Door)])


def _since(request: Any) -> int | None:
    """The number of events that whoever asks has; None: it is none."""
    since = request.query_params.get("since", "0")
    return int(since) if since.isascii() and since.isdecimal() and len(since) <= 18 else None


class Streams:
    """Browsers that follow, of whom there is a limit: each costs something at every look."""

    def __init__(self, board: Board) -> None:
        self._board, self._count = board, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One of them, until it goes."""
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, Response, StreamingResponse

        since = _since(Request(scope))
        if since is None:
            await Response(status_code=400)(scope, receive, send)
            return
        if self._count >= MAX_STREAMS:
            full = f"{MAX_STREAMS} browsers follow this page, and more may not: close one\n"
            await PlainTextResponse(full, status_code=503, headers=HEADERS)(scope, receive, send)
            return
        self._count += 1
        try:
            stream = _stream(self._board, since)
            await StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)(scope, receive, send)
        finally:
            self._count -= 1


async def _stream(board: Board, since: int) -> AsyncIterator[bytes]:
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    with board.following(wake):
        while not board.is_closed:
            changed.clear()
            for count, piece in board.news(since):
                since = count
                yield b"data: " + piece + b"\n\n"
                await asyncio.sleep(0)  # others have their turn
            try:
                await asyncio.wait_for(changed.wait(), PING_S)
            except TimeoutError:
                yield b": still here\n\n"


def plotly_script() -> bytes:
    """plotly.js, as the package brings it."""
    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
