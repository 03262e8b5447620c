"""The page's server: what browsers get, in pieces; how many may follow; and who is turned away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from support.records import CONTRACT, NOW, progress, seen, told, told_round

from opendiloco.claims import ToldEvaluation
from opendiloco.errors import SettingsError
from opendiloco.monitor import board as board_module
from opendiloco.monitor import web as web_module
from opendiloco.monitor.archive import Archive
from opendiloco.monitor.board import Board
from opendiloco.monitor.door import is_loopback, parse_address, refusal
from opendiloco.monitor.sights import Sights
from opendiloco.monitor.snapshot import snapshot
from opendiloco.monitor.web import make_app

OWN = {"host": "127.0.0.1:8080"}


def take(board: Board, now: float = NOW, *, evaluations: int = 0) -> None:
    """One look, which finds a worker that has told of so many evaluations."""
    tells = told(
        told_round(), evaluations=[ToldEvaluation(round=3, loss=1 + n / 10, tokens=9) for n in range(evaluations)]
    )
    sights = Sights()
    sights.look({"a": seen(progress(issued=now - 1), tells, until=now + 11)}, now, [CONTRACT])
    board.take(sights.workers, snapshot([CONTRACT], sights.workers, now))


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board(Archive())
    yield board
    board.close()


def pieces(board: Board, since: int = 0) -> list[dict[str, Any]]:
    return [json.loads(piece) for _, piece in board.news(since)]


def test_events_come_in_pieces_of_which_the_last_has_the_snapshot(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "PIECE_EVENTS", 4)
    assert [(piece["count"], piece["snapshot"], piece["events"]) for piece in pieces(board)] == [(0, None, [])]
    take(board, evaluations=8)
    found = pieces(board)
    assert [(piece["count"], len(piece["events"]), piece["snapshot"] is None) for piece in found] == [
        (4, 4, True),
        (8, 4, True),
        (10, 2, False),
    ]
    assert [event["kind"] for event in found[0]["events"]] == ["state", "round", "evaluation", "evaluation"]
    assert found[2]["snapshot"]["run"]["id"] == "test"
    assert [count for count, _ in board.news(0)] == [4, 8, 10]
    assert pieces(board, since=8) == [found[2]]
    assert [(piece["count"], piece["events"]) for piece in pieces(board, since=99)] == [(10, [])]


class Request:
    """A request to the page's server, and what comes back."""

    def __init__(self, app: Any, path: str, query: str = "", **headers: str) -> None:
        self.status, self.body = 0, b""
        self.began, self._gone = asyncio.Event(), asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in {**OWN, **headers}.items()],
            "server": ("127.0.0.1", 8080),
            "client": ("127.0.0.1", 40000),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        self.began.set()

    async def end(self) -> Request:
        """The browser goes."""
        await self.began.wait()
        self._gone.set()
        await self.task
        return self


def test_so_many_may_follow_and_one_that_goes_leaves_room_for_another(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_module, "MAX_STREAMS", 2)
    take(board)

    async def browse() -> None:
        app = make_app(board, local_name="127.0.0.1")
        streams = [Request(app, "/api/stream") for _ in range(2)]
        for stream in streams:
            await stream.began.wait()
        more = await Request(app, "/api/stream").end()
        assert (more.status, more.body) == (503, b"2 browsers follow this page, and more may not: close one\n")
        assert (await Request(app, "/api/news").end()).status == 200
        assert (await streams[0].end()).body.startswith(b'data: {"life": ')
        another = Request(app, "/api/stream", "since=x")
        assert (await another.end()).status == 400
        another = Request(app, "/api/stream", "since=2")
        assert (await another.end()).status == 200
        await streams[1].end()

    asyncio.run(browse())


def test_a_stream_has_all_pieces_and_then_what_is_new(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "PIECE_EVENTS", 4)
    take(board, evaluations=8)

    async def follow() -> list[dict[str, Any]]:
        stream = web_module._stream(board, 0)
        messages = [json.loads((await anext(stream))[6:]) for _ in range(3)]
        take(board, NOW + 2, evaluations=8)
        messages.append(json.loads((await anext(stream))[6:]))
        board.close()
        assert [message async for message in stream] == []
        return messages

    messages = asyncio.run(follow())
    assert [message["count"] for message in messages] == [4, 8, 10, 10]
    assert [message["snapshot"] and message["snapshot"]["time"] - NOW for message in messages] == [None, None, 0, 2]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, None),
        ("/", {"sec-fetch-site": "cross-site"}, None),  # a link
        ("/api/stream", {"sec-fetch-site": "same-origin"}, None),
        ("/api/stream", {"sec-fetch-site": "none"}, None),
        ("/api/stream", {}, None),
        ("/api/stream", {"origin": "http://127.0.0.1:8080"}, None),
        ("/api/stream", {"sec-fetch-site": "cross-site"}, 403),
        ("/api/stream", {"sec-fetch-site": "same-site"}, 403),  # another port of this machine
        ("/api/stream", {"origin": "https://elsewhere.example"}, 403),
        ("/plotly.js", {"sec-fetch-site": "cross-site"}, 403),
        ("/", {"host": "elsewhere.example"}, 400),
        ("/api/news", {"host": "elsewhere.example:8080"}, 400),
        ("/api/news", {"host": ""}, 400),
        ("/api/news", {"host": "["}, 400),
        ("/api/news", {"host": "192.0.2.1:8080"}, 400),
        ("/api/news", {"host": "localhost:9000"}, None),  # by ssh -L
        ("/api/news", {"host": "[::1]:8080"}, None),
        ("/api/news", {"host": "127.0.1.1"}, None),
        ("/api/news", {"host": "Desk:8080"}, None),
    ],
)
def test_other_sites_are_turned_away(path: str, headers: dict[str, str], status: int | None) -> None:
    refused = refusal(path, {**OWN, **headers}, local_name="desk")
    assert (refused and refused[0]) == status


def test_a_page_that_is_for_others_too_has_any_name_and_is_no_other_sites() -> None:
    there = {"host": "monitor.example:8080"}
    assert refusal("/api/news", there, local_name=None) is None
    assert refusal("/api/news", {**there, "origin": "http://monitor.example:8080"}, local_name=None) is None
    assert refusal("/api/news", {**there, "origin": "http://other.example"}, local_name=None) is not None


def test_the_server_turns_them_away(board: Board) -> None:
    async def statuses() -> list[int]:
        app = make_app(board, local_name="127.0.0.1")
        return [
            (
                await Request(app, path, **{name.replace("_", "-"): value for name, value in headers.items()}).end()
            ).status
            for path, headers in (
                ("/", {}),
                ("/page.js", {}),
                ("/", {"host": "elsewhere.example"}),
                ("/api/stream", {"sec_fetch_site": "cross-site"}),
            )
        ]

    assert asyncio.run(statuses()) == [200, 200, 400, 403]


def test_the_page_has_a_port_of_this_machine_unless_a_host_is_named() -> None:
    assert parse_address("8080") == ("127.0.0.1", 8080)
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert [is_loopback(host) for host in ("127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "192.0.2.1", "x")] == [
        *[True] * 3,
        *[False] * 3,
    ]
    for wrong in ("", "x", "-1", "65536", ":80", "a:b", "1" * 30, "80:"):
        with pytest.raises(SettingsError, match=r"--web is .*: give PORT or HOST:PORT"):
            parse_address(wrong)
