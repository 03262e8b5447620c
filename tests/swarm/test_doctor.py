"""`opendiloco doctor` says what a worker on this machine would run into, before it does."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from opendiloco import doctor
from opendiloco.cli import main
from opendiloco.config import Contract, ModelConfig, PeerConfig, SwarmConfig
from opendiloco.doctor import GIB, clocks, ports
from opendiloco.errors import SettingsError
from opendiloco.needs import needs_of
from opendiloco.peer import Peer

if TYPE_CHECKING:
    from support.commands import Commands
    from support.peers import Network
    from support.waiting import WaitUntil

Ask = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Exit code and lines of the command."""

    def ask(*arguments: str) -> tuple[int, list[str]]:
        code = main(["doctor", "--out", str(tmp_path / "none" / "yet"), *arguments])
        said = capfd.readouterr()
        assert said.err == ""
        return code, said.out.splitlines()

    return ask


def bad(lines: list[str]) -> list[str]:
    return [line.removeprefix("BAD  ") for line in lines if line.startswith("BAD")]


def test_a_machine_that_can_take_part_in_a_run_hears_what_it_is_and_what_it_takes(
    commands: Commands, ask: Ask, wait_until: WaitUntil
) -> None:
    worker = commands.worker(contract=commands.contract(rounds=100_000))
    wait_until(lambda: [one for one in worker.events("round") if one["verdict"] == "commit"], "it trains")
    code, lines = ask("--peers", *(worker.folder / "addresses").read_text().split())
    assert (code, bad(lines), lines[-1]) == (0, [], "this machine can take part")
    said = "\n".join(lines)
    for part in (
        "ok   opendiloco ",
        "note swarm.host_maddrs /ip4/127.0.0.1/tcp/0 is for this machine only",
        "ok   the swarm answers and reaches this peer at /ip4/127.0.0.1/tcp/",
        "ok   the clock is 0.0",
        "ok   run test: ",
        "ok   workers there: 1",
        "ok   trains on the CPU",
        "ok   memory for ",
        "ok   disk in ",
        "ok   a worker gives ",
        " Mbit/s and takes ",
    ):
        assert part in said
    assert len(worker.events("round")) > 0
    assert worker.popen.poll() is None


def test_a_swarm_that_does_not_answer_is_no_fault_of_the_settings(network: Network, ask: Ask) -> None:
    gone = network.peer().open().addresses
    network.close()
    code, lines = ask("--set", "swarm.startup_timeout_s=1", "--peers", *gone)
    assert (code, len(bad(lines))) == (75, 1)
    assert "none answered" in bad(lines)[0]


def test_a_peer_that_others_cannot_reach_hears_that_it_can_be_a_client(network: Network, ask: Ask) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        elsewhere = f'swarm.announce_maddrs=["/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}"]'
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            port = f'swarm.host_maddrs=["/ip4/127.0.0.1/tcp/{chosen.getsockname()[1]}"]'  # as all profiles name one
        code, lines = ask("--set", elsewhere, "--set", port, "--peers", *network.peer().open().addresses)
    assert code == 64
    assert "others cannot reach this peer: open its port" in bad(lines)[0]
    assert any("as a client (peers/profiles/nat.toml) this machine does get into the swarm" in line for line in lines)
    assert any("the swarm has no run now" in line for line in lines)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.name=hf:/nowhere", "/nowhere"),
        ("compute.device=cuda", "compute.device 'cuda' cannot be used"),
        ("data.tokenizer=/nowhere", "/nowhere"),
    ],
)
def test_what_a_run_needs_and_this_machine_lacks_is_told_with_its_setting(ask: Ask, setting: str, said: str) -> None:
    code, lines = ask("--set", setting)
    assert (code, len(bad(lines))) == (64, 1)
    assert said in bad(lines)[0]


def test_too_little_memory_or_disk_is_told_in_numbers(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    code, lines = ask("--set", "model.name=150m")
    assert code == 64
    memory, disk = bad(lines)
    assert "GiB needed, 1.0 GiB free" in memory
    assert "GiB needed, 0.0 GiB free" in disk


def test_a_folder_that_cannot_be_written_is_told_of(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "none").touch()  # where a folder should be
    code, lines = ask()
    assert (code, bad(lines)) == (64, [f"cannot write {tmp_path / 'none'}: Not a directory: choose another --out"])


def test_a_user_need_not_wait_for_a_hub_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers, main_thread = threading.Event(), threading.main_thread().ident

    def ask_hub(*_: object, **__: object) -> Any:
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)
        assert answers.wait(30)
        raise SettingsError("it has answered")

    monkeypatch.setattr(doctor, "needs_of", ask_hub)
    try:
        assert main(["doctor", "--out", str(tmp_path)]) == 130
    finally:
        answers.set()
    assert "it has answered" not in capfd.readouterr().out


def test_needs_grow_with_what_is_trained_and_kept() -> None:
    def needs(model: ModelConfig, **changes: Any) -> Any:
        return needs_of(Contract(model=model), PeerConfig.model_validate(changes), on_gpu=False)

    small, large = needs(ModelConfig(name="14m")), needs(ModelConfig(name="60m"))
    assert large.host_bytes - small.host_bytes == pytest.approx(10.8 * 4 * (large.trained - small.trained), rel=0.3)
    keeping = needs(ModelConfig(name="14m"), checkpoint={"every_rounds": 1, "keep": 4})
    assert keeping.disk_bytes - small.disk_bytes == 5 * 16 * small.trained
    frozen = needs(ModelConfig(name="14m", frozen=("model.embed_tokens.*",)))
    assert (frozen.parameters, frozen.trained < small.trained) == (small.parameters, True)
    assert frozen.host_bytes < small.host_bytes


@pytest.mark.parametrize(
    ("offsets", "line"),
    [
        ([None, None], "note no peer told the time, so clocks could not be compared"),
        ([0.25, None], "ok   the clock is 0.25 s behind the swarm's"),
        ([-2.5, -2.5], "BAD  the clock is 2.50 s ahead of the swarm's: set it, for example with NTP"),
    ],
)
def test_clocks_are_compared_with_those_of_the_peers(offsets: list[float | None], line: str) -> None:
    class Onlooker:
        def clock_offset(self, peer: str) -> float | None:
            return {"A": offsets[0], "B": offsets[1]}[peer]

    addresses = ["/ip4/1.2.3.4/tcp/1/p2p/A", "/ip4/1.2.3.4/tcp/2/p2p/B"]
    (found,) = clocks(cast("Peer", Onlooker()), addresses)
    assert str(found).startswith(line)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host_maddrs": ("/ip4/0.0.0.0/tcp/4001",)}, "ok   TCP port 4001 has to be open"),
        ({"host_maddrs": ("/ip4/0.0.0.0/tcp/0",)}, "note swarm.host_maddrs /ip4/0.0.0.0/tcp/0 takes any port"),
        ({"client_mode": True}, "ok   swarm.client_mode: no port needs to be open"),
    ],
)
def test_ports_that_have_to_be_open_are_named(settings: dict[str, Any], said: str) -> None:
    (found,) = ports(SwarmConfig.model_validate(settings))
    assert str(found).startswith(said)
