"""A small hub on loopback: one data set repository under the real hub's paths, and faults on command."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

import datasets
import huggingface_hub
import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """What happens to the next requests whose path contains `path`, instead of an answer."""

    kind: str
    """A status (503), `cut` (the body breaks off), `refuse` (the connection is closed), or `stall` (no answer)."""
    path: str = ""
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)


class Hub:
    """Serves `files` (path -> content) as the data set `owner/set` until it is closed."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files, self.faults = dict(files), list[Fault]()
        self.seen = deque[str](maxlen=10_000)
        """Method, path and range of every request."""
        self.suffered = list[str]()
        """Kinds of the faults that requests met."""
        self.ended = threading.Event()
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        huggingface_hub.close_session()

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Have the libraries of this process, which read HF_ENDPOINT when they are imported, ask this hub."""
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        template = f"{self.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", self.endpoint)
        for asks_elsewhere in ("USE_PARQUET_EXPORT", "HF_UPDATE_DOWNLOAD_COUNTS"):
            monkeypatch.setattr(datasets.config, asks_elsewhere, False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "datasets"))

    def forget_listings(self) -> None:
        """Have the libraries ask for the list of files again."""
        huggingface_hub.HfFileSystem.clear_instance_cache()

    def fault(self, path: str) -> Fault | None:
        """The fault that this request meets."""
        with self._lock:
            for fault in self.faults:
                if fault.times and fault.path in path:
                    fault.times -= 1
                    self.suffered.append(fault.kind)
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.seen.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        length = int(self.headers.get("Content-Length", 0))
        asked = self.rfile.read(length)
        fault = self.hub.fault(path)
        if fault is None or fault.kind == "cut":
            self._answer(path, asked, cut=fault is not None)
        elif fault.kind == "refuse":
            self.close_connection = True
        elif fault.kind == "stall":
            self.hub.ended.wait(30)
            self.close_connection = True
        else:
            self._send(b"", status=int(fault.kind), headers=fault.headers)

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _answer(self, path: str, asked: bytes, *, cut: bool) -> None:
        api, files = "/api/datasets/owner/set", "/datasets/owner/set/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            self._send(json.dumps({"id": "owner/set", "sha": SHA, "siblings": []}).encode(), cut=cut)
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            if listed := _listed(self.hub.files, folder, recursive="recursive=true" in self.path.lower()):
                self._send(json.dumps(listed).encode(), cut=cut)
            else:
                self._send(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
        elif path.startswith(f"{api}/paths-info/"):
            names = json.loads(asked)["paths"]
            known = [_described(name, self.hub.files[name]) for name in names if name in self.hub.files]
            self._send(json.dumps(known).encode(), cut=cut)
        elif path.startswith(files) and (name := path.removeprefix(files).split("/", 1)[1]) in self.hub.files:
            self._send_file(self.hub.files[name], cut=cut)
        else:
            code = "EntryNotFound" if path.startswith(files) else "RepoNotFound"
            self._send(b"", status=404, headers={"X-Error-Code": code, "X-Error-Message": "not here"})

    def _send_file(self, content: bytes, *, cut: bool) -> None:
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if (span := self.headers.get("Range")) is None:
            self._send(content, headers=headers, cut=cut)
            return
        first, last = span.removeprefix("bytes=").split("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        self._send(content[start : end + 1], status=206, headers=headers, cut=cut)

    def _send(
        self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


def _listed(files: Mapping[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    inside = {name: content for name, content in files.items() if name.startswith(prefix)}
    folders = {name[: name.index("/", len(prefix))] for name in inside if "/" in name.removeprefix(prefix)}
    shown = {name: content for name, content in inside.items() if recursive or "/" not in name.removeprefix(prefix)}
    return [{"type": "directory", "path": name, "size": 0, "oid": SHA} for name in sorted(folders)] + [
        _described(name, content) for name, content in shown.items()
    ]


def _described(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
