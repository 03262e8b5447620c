"""`opendiloco doctor`: whether this machine can take part in a run, in plain lines, each with what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import shutil
import signal
import statistics
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from opendiloco.claims import Seen
from opendiloco.compute import choose_device
from opendiloco.config import ComputeConfig, Contract, SwarmConfig
from opendiloco.errors import OpendilocoError, SettingsError, one_line
from opendiloco.leave import Leave, run
from opendiloco.logs import setup_logging
from opendiloco.machine import available_bytes, cores
from opendiloco.needs import Needs, needs_of, state_vectors
from opendiloco.peer import Peer
from opendiloco.settings import Settings

GIB = 2**30
MAX_SKEW_S = 1.0
"""Of clocks, before it is worth a word; a DHT refuses three seconds."""
RUN_WAIT_S = 2.0
PROBED = 3
"""Workers with which bandwidth is measured."""
SLOW_SHARE, SLOW_S = 0.1, 2.0
"""Of an inner phase, and at least: an exchange that takes longer than that is worth a word."""
MARKS = {"ok": "ok   ", "note": "note ", "bad": "BAD  "}


@dataclass(frozen=True)
class Finding:
    """One line."""

    kind: Literal["ok", "note", "bad"]
    text: str
    code: int = SettingsError.exit_code
    """Exit code of a worker that such a thing would end."""

    def __str__(self) -> str:
        return MARKS[self.kind] + self.text


def run_doctor(settings: Settings, out: Path, *, run_id: str | None) -> int:
    """Look at everything and print it; the exit code is that of a worker: 0 where nothing is in the way.

    Args:
        settings: with the contract of --run, which counts where the swarm has none.
        out: where a worker would keep its files.
    """
    codes = {0}
    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(Leave), setup_logging(None, console=False):
            for finding in examine(settings, out, run_id=run_id, stop=stop):
                print(finding, flush=True)
                codes |= {finding.code} if finding.kind == "bad" else set()
        if stop.is_set():
            return 130
        well = codes == {0}
        print("this machine can take part" if well else "this machine cannot take part as it is: see BAD above")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return SettingsError.exit_code if SettingsError.exit_code in codes else max(codes)


def examine(settings: Settings, out: Path, *, run_id: str | None, stop: threading.Event) -> Iterator[Finding]:
    """Everything, in the order in which it gets known."""
    yield versions()
    yield from ports(settings.peer.swarm)
    contract, seen = settings.contract, dict[str, Seen]()
    if settings.peer.swarm.peers:
        with contextlib.ExitStack() as stack:
            try:
                peer = yield from joined(settings.peer.swarm, stack, stop)
            except OpendilocoError as error:
                yield Finding("bad", str(error), code=error.exit_code)
            else:
                yield from clocks(peer, settings.peer.swarm.peers)
                found = yield from run_of(peer, run_id)
                if found is not None:
                    contract, seen = found, peer.observe(found.run.id)
                    yield from versions_of(seen)
                needs = yield from fits(settings, contract, out, stop)
                if needs is not None and found is not None:
                    yield from bandwidth(peer, contract, needs, seen)
                return
    else:
        yield Finding("note", "no --peers: whether others can be reached, and this peer by them, was not looked at")
    yield from fits(settings, contract, out, stop)


def versions() -> Finding:
    """Of what matters."""
    packages = ("opendiloco-p2p", "torch", "hivemind", "transformers")
    named = ", ".join(f"{name.removesuffix('-p2p')} {importlib.metadata.version(name)}" for name in packages)
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        return Finding("bad", f"{machine}: the hivemind package brings libp2p's daemon for Linux x86_64 only")
    return Finding("ok", f"{named}, Python {platform.python_version()} on {machine}")


def ports(config: SwarmConfig) -> Iterator[Finding]:
    """Which ones others must reach."""
    if config.client_mode:
        yield Finding("ok", "swarm.client_mode: no port needs to be open; this peer reduces nothing for others")
        return
    for address in config.host_maddrs:
        found = re.fullmatch(r"/ip[46]/([^/]+)/tcp/(\d+)", address)
        if found is None:
            continue
        host, port = found.groups()
        if host in ("127.0.0.1", "::1"):
            yield Finding("note", f"swarm.host_maddrs {address} is for this machine only: see peers/profiles")
        elif port == "0":
            yield Finding("note", f"swarm.host_maddrs {address} takes any port: name one that can be opened")
        else:
            yield Finding("ok", f"TCP port {port} has to be open from outside (swarm.host_maddrs)")


def joined(config: SwarmConfig, stack: contextlib.ExitStack, stop: threading.Event) -> Generator[Finding, None, Peer]:
    """The peer on the DHT, as the value of the generator: reachable from outside if it can be.

    Raises:
        OpendilocoError: neither that nor as a client.
    """
    try:
        with contextlib.ExitStack() as first:  # closed before another one begins, which needs the same port and key
            peer = first.enter_context(Peer(config, None, leaving=stop.is_set))
            peer.open()
            stack.push(first.pop_all())
    except SettingsError as error:
        if "cannot reach this peer" not in str(error):
            raise
        yield Finding("bad", str(error))
        client = config.model_copy(update={"client_mode": True, "announce_maddrs": ()})
        peer = stack.enter_context(Peer(client, None, leaving=stop.is_set))
        peer.open()
        yield Finding("note", "as a client (peers/profiles/nat.toml) this machine does get into the swarm")
    else:
        if config.client_mode:
            yield Finding("ok", "the swarm answers")
        else:
            yield Finding("ok", f"the swarm answers and reaches this peer at {', '.join(peer.addresses[:3])}")
    return peer


def clocks(peer: Peer, addresses: Sequence[str]) -> Iterator[Finding]:
    """This machine's against those of the peers that were named."""
    named = dict.fromkeys(address.rpartition("/p2p/")[2] for address in addresses)
    offsets = [offset for one in named if (offset := peer.clock_offset(one)) is not None]
    if not offsets:
        yield Finding("note", "no peer told the time, so clocks could not be compared")
        return
    offset_s = statistics.median(offsets)
    text = f"the clock is {abs(offset_s):.2f} s {'behind' if offset_s > 0 else 'ahead of'} the swarm's"
    if abs(offset_s) > MAX_SKEW_S:
        yield Finding("bad", f"{text}: set it, for example with NTP (timedatectl set-ntp true)")
    else:
        yield Finding("ok", text)


def run_of(peer: Peer, run_id: str | None) -> Generator[Finding, None, Contract | None]:
    """The contract of the run that is meant, if the swarm has one."""
    try:
        contract = peer.find_contract(run_id, wait_s=RUN_WAIT_S, with_workers=False)
    except SettingsError as error:
        yield Finding("bad", str(error))
        return None
    if contract is None:
        what = f"run {run_id}" if run_id else "run"
        yield Finding("note", f"the swarm has no {what} now: what follows is for --run, or for default settings")
    else:
        yield Finding(
            "ok",
            f"run {one_line(contract.run.id)}: {one_line(contract.model.name)}, {contract.run.rounds} rounds of "
            f"{contract.inner.steps} steps, codec {contract.outer.codec}, contract {contract.digest[:12]}",
        )
    return contract


def versions_of(seen: Mapping[str, Seen]) -> Iterator[Finding]:
    """Those of the workers against this one."""
    own = importlib.metadata.version("opendiloco-p2p")
    others = sorted({one.told.version for one in seen.values() if one.told is not None} - {own})
    there = sum(one.progress is not None and one.progress.state != "left" for one in seen.values())
    yield Finding("ok", f"workers there: {there}")
    if others:
        yield Finding("note", f"workers run opendiloco {', '.join(others)}, and this machine has {own}")


def fits(
    settings: Settings, contract: Contract, out: Path, stop: threading.Event
) -> Generator[Finding, None, Needs | None]:
    """Device, memory and disk against what the run needs."""
    try:
        device = choose_device(settings.peer.compute)
        on_gpu = device.type == "cuda"  # a hub that does not answer is waited for, but not by a user who wants to go
        needs = run(lambda: needs_of(contract, settings.peer, on_gpu=on_gpu), stop.is_set, name="needs")
    except SettingsError as error:
        yield Finding("bad", str(error))
        return None
    yield from _device(device, settings.peer.compute)
    size = f"{needs.parameters / 1e6:,.1f}M parameters"
    if needs.trained != needs.parameters:
        size += f" ({needs.trained / 1e6:,.2f}M trained)"
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        yield _enough(f"GPU memory for {size}, without activations", needs.device_bytes, free)
    yield _enough(f"memory for {size}, without activations", needs.host_bytes, available_bytes())
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        yield Finding("bad", f"cannot write {there}: {error.strerror}: choose another --out")
    else:
        yield _enough(f"disk in {there}", needs.disk_bytes, shutil.disk_usage(there).free)
    return needs


def _device(device: torch.device, compute: ComputeConfig) -> Iterator[Finding]:
    if device.type != "cuda":
        yield Finding("ok", f"trains on the CPU ({cores()} cores), {compute.precision}")
        return
    name, has_bf16 = torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False)
    if compute.precision == "bf16" and not has_bf16:
        yield Finding("bad", f"{name} has no bf16: set compute.precision to fp16 or fp32")
    else:
        advice = "" if compute.precision != "fp32" or not has_bf16 else " (compute.precision=bf16 would be faster)"
        yield Finding("ok", f"trains on {name}, {compute.precision}{advice}")


def _enough(what: str, needed: int, there: int) -> Finding:
    text = f"{what}: {needed / GIB:.1f} GiB needed, {there / GIB:.1f} GiB free"
    return Finding("ok", text) if needed <= there else Finding("bad", f"{text}: use a larger machine, or free some")


def bandwidth(peer: Peer, contract: Contract, needs: Needs, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    """Both ways, with the worker that gives and takes most, and what a round and a join take with it."""
    donors = [one for one, found in seen.items() if found.progress is not None and _can_give(found)][:PROBED]
    vectors = state_vectors(contract)
    down = max((rate for one in donors if (rate := peer.download(one, contract, needs.trained, vectors))), default=None)
    if down is None:
        yield Finding("note", "no worker can give anything now, so the bandwidth could not be measured")
        return
    up = max((rate for one in donors if (rate := peer.upload(one))), default=None)
    if up is None:
        yield Finding("note", "no worker has said how much comes of what this machine sends: ask again in a minute")
    slowest = min(down, up or down)
    state_s, exchange_s = needs.state_bytes / down, needs.exchange_bytes / slowest
    phases = [one.told.rounds[-1].inner_s for one in seen.values() if one.told and one.told.rounds]
    phase_s = statistics.median(phases or [0.0])
    takes = f" and takes {_mbit(up)}" if up else ""
    text = (
        f"a worker gives {_mbit(down)}{takes}: the state comes in about {state_s:,.0f} s, and a round's exchange takes "
        f"at least {exchange_s:,.1f} s"
    )
    if exchange_s > max(SLOW_S, SLOW_SHARE * phase_s):
        yield Finding("note", f"{text}; phases take {phase_s:,.0f} s: others will wait for this link")
    else:
        yield Finding("ok", text)


def _mbit(rate: float) -> str:
    """Of bytes per second."""
    return f"{rate * 8 / 1e6:,.0f} Mbit/s"


def _can_give(found: Seen) -> bool:
    return found.progress is not None and found.progress.state != "left" and not found.progress.client_mode
