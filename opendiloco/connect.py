"""libp2p and the DHT node of one peer: start them, explain why they do not start, stop them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

from opendiloco.config import SwarmConfig
from opendiloco.dialback import SILENCE_S as DIALBACK_S
from opendiloco.dialback import STREAM_NAME as DIALBACK_STREAM
from opendiloco.dialback import Dialback, ask
from opendiloco.errors import SettingsError, SwarmError, one_line
from opendiloco.identity import Identity
from opendiloco.membership import SignedRecords
from opendiloco.uplink import Uplink
from opendiloco.wire import Stream, WireError

PORT_WAIT_S = 5.0  # for the port of a predecessor that is just going
CLOSE_LIMIT_S = 1.0
REACH_OTHERS_S = 0.5  # for further peers, once one has answered
REDIAL_S = 0.5
CONTACT_TRIES = 3
MAX_RECONNECTS = 3  # lost peers that are tried at a time
DHT_WAIT_S = 3.0  # hivemind's own, for an answer of one peer
MAX_CLOCK_SKEW_S = 3.0  # hivemind's MAX_DHT_TIME_DISCREPANCY_SECONDS
MAX_DIALBACKS = 3
DHT_REPLICAS, DHT_BUCKET = 3, 8
TRANSPORT_ERRORS = (P2PDaemonError, P2PHandlerError, OSError, EOFError, TimeoutError)


class Host:
    """This peer on the network: `p2p` (its libp2p daemon) and `node` (its part of the DHT)."""

    p2p: P2P
    node: DHTNode

    def __init__(self, config: SwarmConfig, identity: Identity, runtime_dir: Path) -> None:
        self._config, self._identity, self._runtime_dir = config, identity, runtime_dir

    async def open(self) -> None:
        """Start libp2p and join the DHT through the configured peers.

        Raises:
            SettingsError: a malformed address, a taken port, a clock that is off.
            SwarmError: none of the peers answers in time.
        """
        named = [_parse_address("swarm.peers", address, needs_peer=True) for address in self._config.peers]
        peers = [address for address in named if str(_peer_of(address)) != self._identity.peer_id]
        if named and not peers:
            raise SettingsError(
                f"swarm.peers names only this peer itself ({self._identity.peer_id}): name another one, or, where "
                f"another peer uses this key, too, give this one a key of its own (swarm.identity, or another folder)"
            )
        for address in (*self._config.host_maddrs, *self._config.announce_maddrs):
            _parse_address("swarm.host_maddrs", address, needs_peer=False)
        await _wait_for_ports(self._config.host_maddrs)
        limit_s, answer_s = self._config.startup_timeout_s, min(DHT_WAIT_S, self._config.expiry_s / 4)
        try:
            async with asyncio.timeout(limit_s):
                self.p2p = await self._start_daemon(limit_s)
                reached = await self._reach(peers)
                self.node = await DHTNode.create(
                    p2p=self.p2p,
                    initial_peers=reached or None,
                    client_mode=self._config.client_mode,
                    record_validator=SignedRecords(self._identity),
                    # Records are renewed at every beat and read by everybody: few peers keep one, and only those give
                    # it away, or what a worker reads would grow with the square of their number
                    num_replicas=DHT_REPLICAS,
                    bucket_size=DHT_BUCKET,
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    wait_timeout=limit_s,  # the first answer decides, and may come late
                    bootstrap_timeout=answer_s,
                    strict=False,  # what others find wrong with this peer they are asked again below
                )
                self.node.protocol.wait_timeout = answer_s  # one silent peer spoils no look-up
                await asyncio.gather(Dialback(self.p2p).open(), Uplink(self.p2p).open())
                await asyncio.gather(*(self._check_contact(_peer_of(peer)) for peer in reached))
                if not self._config.client_mode:
                    await self._check_reachable(reached)
        except ValidationError as error:
            raise _explain_validation(str(error), self._identity.path) from None
        except (*TRANSPORT_ERRORS, RuntimeError) as error:
            raise self._explain(error, limit_s) from None

    async def addresses(self) -> list[str]:
        """Full addresses (with the peer id) at which others can join through this peer."""
        return [str(address) for address in await self.p2p.get_visible_maddrs()]

    async def daemon_end(self) -> int:
        """Wait until libp2p's daemon has ended, which it never does by itself; returns its exit code."""
        code: int = await self.p2p._child.wait()  # hivemind would go on without a word
        return code

    async def is_alive(self, peer: PeerID) -> bool:
        """Whether the network process of `peer` answers."""
        return await self.node.protocol.call_ping(peer) is not None

    async def reconnect(self, known: Iterable[str]) -> None:
        """Try to get back to peers that have fallen out of this peer's part of the DHT.

        The DHT forgets whoever does not answer, and two halves of a torn network forget each other for good: nothing
        in it ever looks for a peer that was lost. Here each side does, a few peers at a time.
        """
        initial = {_peer_of(address): address for address in map(Multiaddr, self._config.peers)}
        everybody = {*initial, *map(PeerID.from_base58, known)} - {self.p2p.peer_id}
        lost = [peer for peer in everybody if self.node.protocol.routing_table.get(peer_id=peer) is None]
        for peer in random.sample(lost, min(len(lost), MAX_RECONNECTS)):
            if (peer not in initial or await self._dial(initial[peer])) and await self.is_alive(peer):
                self.node.blacklist.register_success(peer)

    async def close(self) -> None:
        """Leave the DHT and stop libp2p."""
        if hasattr(self, "node"):
            with contextlib.suppress(*TRANSPORT_ERRORS, RuntimeError):  # RuntimeError: the daemon has gone already
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self.node.shutdown()
        if hasattr(self, "p2p"):
            try:
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self.p2p.shutdown()
            except TimeoutError:  # it is frozen
                self.p2p._child.kill()
                await self.p2p._child.wait()

    async def _reach(self, peers: Sequence[Multiaddr]) -> list[Multiaddr]:
        """Connect to all at once (the daemon by itself would do so one after the other); returns those that answer.

        Tries again until one does, and waits a moment longer for others.
        """
        reached: list[Multiaddr] = []

        async def reach(peer: Multiaddr) -> None:
            while not (await self._dial(peer) and await self._has_dht(_peer_of(peer))):
                await asyncio.sleep(REDIAL_S)
            reached.append(peer)

        if tasks := {asyncio.create_task(reach(peer)) for peer in peers}:
            try:
                _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if others:
                    await asyncio.wait(others, timeout=REACH_OTHERS_S)
            finally:
                for task in tasks:
                    task.cancel()
        return reached

    async def _check_contact(self, peer: PeerID) -> None:
        """Ask a peer whether it reaches this one, more than once: either may be too busy to answer in time.

        Raises:
            ValidationError: it does not, or its clock shows another time.
        """
        for tries_left in reversed(range(CONTACT_TRIES)):
            try:
                await self.node.protocol.call_ping(peer, validate=True)
                return
            except ValidationError as error:
                if not tries_left or _clocks(str(error)) is not None:
                    raise
            await asyncio.sleep(REDIAL_S)

    async def _check_reachable(self, peers: Sequence[Multiaddr]) -> None:
        """Ask some peers to dial this one anew.

        Raises:
            ValidationError: some have tried, and none of them could. Who cannot say counts neither way.
        """
        own = await self.p2p.get_visible_maddrs()

        async def ask_one(peer: str) -> bool | None:
            try:
                stream = await open_stream(self.p2p, peer, DIALBACK_STREAM, silence_s=DIALBACK_S)
            except WireError:
                return None
            return await ask(stream, own)

        answers = await asyncio.gather(*(ask_one(str(_peer_of(peer))) for peer in peers[:MAX_DIALBACKS]))
        if False in answers and True not in answers:
            raise ValidationError("others have dialled this peer and got no answer")

    async def _dial(self, peer: Multiaddr) -> bool:
        try:
            await self.p2p._client.connect(_peer_of(peer), [peer.decapsulate(f"/p2p/{peer['p2p']}")])
        except TRANSPORT_ERRORS:
            return False
        return True

    async def _has_dht(self, peer: PeerID) -> bool:
        """Whether a peer answers as a part of the DHT. Its daemon listens a moment before it does."""
        request = dht_pb2.PingRequest()
        try:
            await self.p2p.call_protobuf_handler(peer, "DHTProtocol.rpc_ping", request, dht_pb2.PingResponse)
        except TRANSPORT_ERRORS:
            return False
        return True

    async def _start_daemon(self, limit_s: float) -> P2P:
        class PrivateP2P(P2P):  # type: ignore[misc]
            """Keeps its sockets in this peer's runtime folder, where the guard removes them."""

            _UNIX_SOCKET_PREFIX = f"/unix{self._runtime_dir}/"

        return await PrivateP2P.create(
            host_maddrs=self._config.host_maddrs,
            announce_maddrs=self._config.announce_maddrs or None,
            identity_path=str(self._identity.path),
            check_if_identity_free=False,  # knows RSA keys only, and starts a second daemon to find out
            dht_mode="client" if self._config.client_mode else "server",
            nat_port_map=False,
            startup_timeout=limit_s,
        )

    def _explain(self, error: Exception, limit_s: float) -> SwarmError:
        if not hasattr(self, "p2p") or not self._config.peers:
            reason = f" ({one_line(str(error))})" if str(error) else ""
            return SwarmError(
                f"libp2p did not start within {limit_s:g} s{reason}: raise swarm.startup_timeout_s, or see log.txt"
            )
        named = ", ".join(self._config.peers[:3]) + (", ..." if len(self._config.peers) > 3 else "")
        return SwarmError(
            f"swarm.peers {named}: none answered: check that one of them runs and can be reached from here, or name "
            f"another peer of the run (swarm.startup_timeout_s is {limit_s:g})"
        )


async def open_stream(p2p: P2P, peer: str, name: str, *, silence_s: float) -> Stream:
    """A stream to the handler `name` of another peer.

    Raises:
        WireError: the peer cannot be reached within `silence_s` seconds.
    """
    try:
        async with asyncio.timeout(silence_s):
            _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer), name)
    except (*TRANSPORT_ERRORS, ValueError) as error:
        raise WireError(f"cannot be reached ({error or type(error).__name__})") from None
    return Stream(reader, writer, timeout_s=silence_s)


def _peer_of(address: Multiaddr) -> PeerID:
    return PeerID.from_base58(address["p2p"])


def _parse_address(setting: str, address: str, *, needs_peer: bool) -> Multiaddr:
    try:
        parsed = Multiaddr(address)
        if needs_peer:
            PeerID.from_base58(parsed["p2p"])
    except Exception:  # the parser raises errors of many kinds
        shape = "/ip4/HOST/tcp/PORT/p2p/PEER_ID" if needs_peer else "/ip4/0.0.0.0/tcp/PORT"
        raise SettingsError(f"{setting} {address!r} is no address: write it as {shape}") from None
    return parsed


async def _wait_for_ports(addresses: Sequence[str]) -> None:
    """libp2p shares ports (SO_REUSEPORT), so two daemons on one would both start and both get half the calls."""
    for address in addresses:
        found = re.fullmatch(r"/ip([46])/([^/]+)/tcp/(\d+)(/.*)?", address)
        if found is None:
            continue
        family = socket.AF_INET if found[1] == "4" else socket.AF_INET6
        give_up = time.monotonic() + PORT_WAIT_S
        while not _can_bind(family, found[2], int(found[3])):
            if time.monotonic() > give_up:
                raise SettingsError(
                    f"swarm.host_maddrs {address}: port {found[3]} is taken: stop the process that listens on it or "
                    f"choose another port (0 takes any free one)"
                )
            await asyncio.sleep(0.1)


def _can_bind(family: socket.AddressFamily, host: str, port: int) -> bool:
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (98, 13):  # in use; not permitted
                return False
            raise SettingsError(
                f"swarm.host_maddrs {host}: {error.strerror}: name an address of this machine"
            ) from None
        return True


def _clocks(message: str) -> re.Match[str] | None:
    """This peer's time and the other one's, where the message is about clocks."""
    return re.search(r"local: ([\d.]+), peer: ([\d.]+)", message)


def _explain_validation(message: str, key_file: Path | None) -> SettingsError:
    times = _clocks(message)
    if times is None:
        return SettingsError(
            "swarm.host_maddrs: others cannot reach this peer: open its port, set swarm.announce_maddrs to the address "
            f"they can use, or set swarm.client_mode=true (or swarm.identity {key_file} is another process's key, too)"
        )
    skew_s = float(times[1]) - float(times[2])
    return SettingsError(
        f"the clock of this machine is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the swarm's, "
        f"which tolerates {MAX_CLOCK_SKEW_S:g} s: set it (for example with NTP)"
    )
