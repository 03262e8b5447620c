"""Links between peers: a TCP proxy in front of every announced address, which delays, throttles, stalls or cuts.

Every host of these links has a loopback address of its own, and libp2p dials from the address it listens on, so a
proxy knows both ends of a connection and a cut between two hosts holds whoever had dialled.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

PIECE_BYTES = 16 * 1024
PIECES_ON_THE_WAY = 16
TIMER_SLACK_S = 0.01
LIMIT_S = 20.0


@dataclass
class Host:
    """One machine of the network: where its peer listens, and what the outside world sees."""

    ip: str
    port: int
    outside: int = 0
    """Port of the proxy, on this host's address."""
    rate: float | None = None
    """Bytes per second each way; None: as fast as the machine."""
    delay_s: float = 0.0
    is_stalled: bool = False
    """Takes connections and moves nothing: what a lost route looks like."""
    carried_bytes: int = 0
    _free_at: dict[str, float] = field(default_factory=dict)

    @property
    def prefix(self) -> list[str]:
        """Nothing: processes of all hosts run on this machine as it is."""
        return []

    @property
    def settings(self) -> dict[str, Any]:
        """Settings `swarm.*` of the peer on this host."""
        return {
            "host_maddrs": (f"/ip4/{self.ip}/tcp/{self.port}",),
            "announce_maddrs": (f"/ip4/{self.ip}/tcp/{self.outside}",),
        }

    @property
    def sets(self) -> list[str]:
        """The same as values of --set."""
        return [f'swarm.{name}=["{value[0]}"]' for name, value in self.settings.items()]

    async def carry(self, size: int, way: str) -> None:
        """Wait until this host's link has moved `size` bytes in that direction."""
        self.carried_bytes += size
        if self.rate is not None:
            now = time.monotonic()
            self._free_at[way] = max(self._free_at.get(way, 0.0), now - TIMER_SLACK_S) + size / self.rate
            await asyncio.sleep(self._free_at[way] - now)


class Links:
    """Hosts and the links between them; everything can be changed while connections are up."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self._numbers = itertools.count(2)
        self._hosts: dict[str, Host] = {}
        self._cut: set[frozenset[str]] = set()
        self._pipes: dict[frozenset[str], set[asyncio.StreamWriter]] = {}
        self._servers: list[asyncio.Server] = []

    def host(self, *, rate: float | None = None, delay_s: float = 0.0) -> Host:
        """A new host; `rate` in bytes per second, `delay_s` one way."""
        ip = f"127.0.{threading.get_native_id() % 200 + 1}.{next(self._numbers)}"
        with socket.socket() as probe:
            probe.bind((ip, 0))
            port = probe.getsockname()[1]
        host = Host(ip, port, rate=rate, delay_s=delay_s)
        self._hosts[ip] = host
        self._run(self._listen(host))
        return host

    def cut(self, one: Host, *others: Host) -> None:
        """Break the links between one host and others: connections end, new ones are refused."""
        self._run(self._set_cut(one, others, broken=True))

    def mend(self, one: Host, *others: Host) -> None:
        """Undo `cut`."""
        self._run(self._set_cut(one, others, broken=False))

    def drop_connections(self, host: Host) -> None:
        """End every connection of a host once; new ones are fine."""
        self._run(self._drop(host))

    def close(self) -> None:
        """End all connections."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    async def _listen(self, host: Host) -> None:
        server = await asyncio.start_server(lambda r, w: self._serve(host, r, w), host.ip, 0)
        host.outside = server.sockets[0].getsockname()[1]
        self._servers.append(server)

    async def _set_cut(self, one: Host, others: tuple[Host, ...], *, broken: bool) -> None:
        for other in others:
            pair = frozenset((one.ip, other.ip))
            (self._cut.add if broken else self._cut.discard)(pair)
            if broken:
                self._break(pair)

    async def _drop(self, host: Host) -> None:
        for pair in [pair for pair in self._pipes if host.ip in pair]:
            self._break(pair)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for pair in list(self._pipes):
            self._break(pair)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _break(self, pair: frozenset[str]) -> None:
        for writer in self._pipes.pop(pair, set()):
            writer.transport.abort()

    async def _serve(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")[0]
        pair = frozenset((source, host.ip))
        caller = self._hosts.get(source, host)
        if pair in self._cut:
            writer.transport.abort()
            return
        try:
            inner_reader, inner_writer = await asyncio.open_connection(host.ip, host.port)
        except OSError:
            writer.transport.abort()
            return
        pipes = self._pipes.setdefault(pair, set())
        pipes |= {writer, inner_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, inner_writer, caller, host))
                tasks.create_task(self._pump(inner_reader, writer, host, caller))
        except* (OSError, asyncio.CancelledError):  # cancelled by `close`
            pass
        for end in (writer, inner_writer):
            pipes.discard(end)
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: Host, to: Host) -> None:
        """Move bytes from one host to another at the speed of the slower link; OSError when the connection ends."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_ON_THE_WAY)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(on_the_way, writer, source, to))
            while data := await reader.read(PIECE_BYTES):
                await source.carry(len(data), "out")
                await on_the_way.put((time.monotonic() + source.delay_s + to.delay_s, data))
            raise ConnectionResetError

    async def _deliver(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, source: Host, to: Host
    ) -> None:
        while True:
            arrival, data = await on_the_way.get()
            while source.is_stalled or to.is_stalled:
                await asyncio.sleep(0.05)
            await to.carry(len(data), "in")
            await asyncio.sleep(max(0.0, arrival - time.monotonic()))
            writer.write(data)
            await writer.drain()
