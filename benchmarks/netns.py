"""Hosts of their own on one machine: network namespaces on a bridge, each with an address and a link shaped both ways.

A namespace lives as long as this process holds it open or something runs in it, and links and shapes with it: however
this process ends, the kernel takes all of it away. Needs root, or the capabilities SYS_ADMIN and NET_ADMIN, and the
programs of iproute2 and util-linux. Only tbf shapes, which every kernel has; there is no added delay.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.common import BenchmarkError

SUBNET, HIDDEN_SUBNET = "10.79.0", "10.80"
PORT = 31337
MOST_HOSTS = 200
QUEUE_MS = 100
"""Of a link: what waits longer is dropped, as a home router does it."""
BURST_BYTES = 32 * 1024
PROGRAMS = ("ip", "tc", "nsenter", "unshare")


def why_not() -> str | None:
    """Why this machine or user cannot have hosts of their own; None: they can be had."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{' and '.join(missing)} not found: install iproute2 and util-linux"
    try:
        os.close(_new_namespace())
    except BenchmarkError as error:
        return f"network namespaces are not allowed here: {error}"
    return None


@dataclass(frozen=True)
class NamespaceHost:
    """One machine of the network."""

    number: int
    namespace: int
    """A descriptor that holds it."""
    ip: str
    """Its address."""

    @property
    def prefix(self) -> list[str]:
        """What runs a command there, when put before it. The process is that of the command."""
        return _inside(self.namespace)

    @property
    def path(self) -> str:
        """The namespace as a file."""
        return _path(self.namespace)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings `swarm.*` of the peer on this host."""
        return {"host_maddrs": (f"/ip4/{self.ip}/tcp/{PORT}",)}

    @property
    def sets(self) -> list[str]:
        """The same as values of --set."""
        return [f'swarm.{name}=["{value[0]}"]' for name, value in self.settings.items()]

    @property
    def carried_bytes(self) -> int:
        """Over its link so far, both ways, headers included."""
        (link,) = json.loads(_run([*self.prefix, "ip", "-json", "-stats", "link", "show", "dev", "eth0"]))
        return sum(int(link["stats64"][way]["bytes"]) for way in ("rx", "tx"))


class Hosts:
    """A network of hosts; use it as a context manager."""

    def __init__(self, count: int, *, mbit: float | None = None, hidden: Collection[int] = ()) -> None:
        """Make hosts.

        Args:
            mbit: what each link carries each way, in Mbit/s; None: as much as the machine can.
            hidden: numbers of hosts, from 0, that stand behind a router which translates addresses: nobody gets to
                them from outside. Needs nft.

        Raises:
            BenchmarkError: it cannot be had; `why_not` says so before.
        """
        if not 1 <= count <= MOST_HOSTS:
            raise BenchmarkError(f"{count} hosts: there can be 1 to {MOST_HOSTS}")
        self._held: list[int] = []
        try:
            self._bridge = self._hold()
            self._ip("link", "add", "name", "bridge0", "type", "bridge")
            self._ip("link", "set", "bridge0", "up")
            self.hosts = [self._add(number, mbit, is_hidden=number in hidden) for number in range(count)]
        except BaseException:
            self.close()
            raise

    def shape(self, host: NamespaceHost, mbit: float) -> None:
        """What its link carries from now on, each way."""
        for where, device in ((host.namespace, "eth0"), (self._bridge, _port(host))):
            shape = ["tbf", "rate", f"{round(mbit * 1000)}kbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
            _run([*_inside(where), "tc", "qdisc", "replace", "dev", device, "root", *shape])

    def cut(self, host: NamespaceHost) -> None:
        """Nothing gets to it or from it any more; nobody is told."""
        _run([*_inside(self._bridge), "ip", "link", "set", _port(host), "nomaster"])

    def mend(self, host: NamespaceHost) -> None:
        """Undo `cut`."""
        _run([*_inside(self._bridge), "ip", "link", "set", _port(host), "master", "bridge0"])

    def close(self) -> None:
        """Let go of all. What still runs on a host keeps that host, without a network."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, number: int, mbit: float | None, *, is_hidden: bool) -> NamespaceHost:
        outside = f"{SUBNET}.{number + 1}"
        namespace = self._on_bridge(_port_name(number), outside)
        host = NamespaceHost(number, namespace, outside)
        if is_hidden:
            host = NamespaceHost(number, self._behind(namespace, number), f"{HIDDEN_SUBNET}.{number}.2")
        if mbit is not None:
            self.shape(host, mbit)
        return host

    def _on_bridge(self, port: str, ip: str) -> int:
        """A namespace with one link, to the bridge."""
        namespace = self._hold()
        self._ip("link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", _path(namespace))
        self._ip("link", "set", port, "master", "bridge0", "up")
        _configure(namespace, "eth0", ip)
        return namespace

    def _behind(self, router: int, number: int) -> int:
        """A namespace whose one link ends at a router, which passes on what comes from there, under its own address."""
        namespace, gateway = self._hold(), f"{HIDDEN_SUBNET}.{number}.1"
        inside = _inside(router)
        peer = ["peer", "name", "eth0", "netns", _path(namespace)]
        _run([*inside, "ip", "link", "add", "name", "lan0", "type", "veth", *peer])
        _configure(router, "lan0", gateway)
        _configure(namespace, "eth0", f"{HIDDEN_SUBNET}.{number}.2")
        _run([*_inside(namespace), "ip", "route", "add", "default", "via", gateway])
        _run([*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        for rule in (
            "add table ip nat",
            "add chain ip nat post { type nat hook postrouting priority 100 ; }",
            "add rule ip nat post oifname eth0 masquerade",
        ):
            _run([*inside, "nft", rule])
        return namespace

    def _hold(self) -> int:
        self._held.append(_new_namespace())
        return self._held[-1]

    def _ip(self, *arguments: str) -> None:
        _run([*_inside(self._bridge), "ip", *arguments])


def _port(host: NamespaceHost) -> str:
    """The bridge's end of a host's link."""
    return _port_name(host.number)


def _port_name(number: int) -> str:
    return f"port{number}"


def _configure(namespace: int, device: str, ip: str) -> None:
    """Give a namespace's link its address."""
    for arguments in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"{ip}/24", "dev", device],
        ["link", "set", device, "up"],
    ):
        _run([*_inside(namespace), "ip", *arguments])


def _path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _inside(namespace: int) -> list[str]:
    return ["nsenter", f"--net={_path(namespace)}", "--"]


def _new_namespace() -> int:
    """A descriptor that holds a new network namespace."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise BenchmarkError(process.stderr.read().strip())
        return os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command[3:])}: {done.stderr.strip()}")
    return done.stdout
