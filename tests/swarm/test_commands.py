"""Commands that cannot work end with one line that names setting, values and cure, and the right exit code.

The commands run in this process: what they start, network process and libp2p daemon, is real.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opendiloco.cli import main
from opendiloco.config import Contract, InnerConfig, ModelConfig, RoundsConfig, SwarmConfig
from opendiloco.flat import FlatLayout
from opendiloco.identity import Identity
from opendiloco.model import build_model
from opendiloco.rounds import Position
from opendiloco.settings import write_toml
from opendiloco.swarm import Swarm
from opendiloco.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from support.commands import SmallContract
    from support.peers import Network

WRONG_SETTINGS, NO_SWARM = 64, 75
NOBODY = "12D3KooWPVkYcj4DJaNsg92hMm1yLkBYbwtSipMDBsCuGbFShCXa"

PROGRESS = (
    "a worker starts, in ",
    "joined a swarm",
    "started a swarm",
    "run ",
    "waiting up to ",
)  # what it says before

Fail = Callable[..., str]


@pytest.fixture
def fail(tmp_path: Path, text_file: Path, capfd: pytest.CaptureFixture[str]) -> Fail:
    """Runs `opendiloco train` with small settings; returns its one line of complaint after checking that it is one."""

    def run(code: int, *arguments: str, sets: Sequence[str] = (), peers: Sequence[str] = ()) -> str:
        small = [f"data.source=text:{text_file}", "data.seq_len=32", "compute.threads=1"]
        overrides = sets if peers else [*small, *sets]
        options = [part for override in overrides for part in ("--set", override)]
        options += ["--peers", *peers] if peers else []
        exit_code = main(["train", *arguments, *options, "--out", str(tmp_path / "out")])
        captured = capfd.readouterr()
        assert exit_code == code, captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err
        lines = [line for line in captured.err.splitlines() if not line.startswith(PROGRESS)]
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("opendiloco: ")
        return lines[0]

    return run


def start_run(network: Network, contract: Contract, peers: Sequence[str] = ()) -> list[str]:
    """A worker of that run; returns its addresses."""
    worker = network.peer(peers).open()
    worker.enter(contract)
    return worker.addresses


def test_unknown_setting(fail: Fail) -> None:
    assert "unknown setting inner.stps" in fail(WRONG_SETTINGS, sets=["inner.stps=3"])


def test_malformed_address_of_a_peer(fail: Fail) -> None:
    line = fail(WRONG_SETTINGS, peers=["127.0.0.1:31337"])
    assert "127.0.0.1:31337" in line
    assert "a full address such as /ip4/203.0.113.5/tcp/31337/p2p/" in line


def test_model_folder_that_is_none(fail: Fail, tmp_path: Path) -> None:
    folder = tmp_path / "no-model"
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing to see here")
    line = fail(WRONG_SETTINGS, sets=[f"model.name=hf:{folder}"])
    assert "model.name" in line
    assert str(folder) in line


def test_sequence_longer_than_the_data(fail: Fail, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words only")
    line = fail(WRONG_SETTINGS, sets=[f"data.source=text:{short}", "data.seq_len=4096"])
    assert "data.seq_len is 4096" in line
    assert "lower data.seq_len or use more text" in line


def test_taken_port(fail: Fail) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = fail(WRONG_SETTINGS, sets=[f'swarm.host_maddrs=["/ip4/127.0.0.1/tcp/{port}"]'])
    assert f"port {port} is taken" in line
    assert "choose another port" in line


def test_bootstrap_peer_that_is_dead(fail: Fail, tmp_path: Path) -> None:
    """And the addresses of an earlier start are gone: nobody shall join through them."""
    address, file = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}", tmp_path / "own.addr"
    file.write_text("of an earlier start")
    options = ("--address-file", str(file))
    line = fail(NO_SWARM, *options, peers=[address], sets=["swarm.startup_timeout_s=5.0"])
    assert f"swarm.peers {address}: none answered: check" in line
    assert not file.exists()


def test_batch_that_the_processes_of_a_worker_cannot_share(
    fail: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun; before anything else happens."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    line = fail(WRONG_SETTINGS, sets=["inner.batch_size=4"])
    assert "inner.batch_size is 4 and this worker has 3 processes: start a number of them that divides it" in line
    assert not (tmp_path / "out" / "log.txt").exists()


def test_client_mode_and_nobody_to_reach(fail: Fail) -> None:
    line = fail(WRONG_SETTINGS, sets=["swarm.client_mode=true"])
    assert "swarm.client_mode is true and swarm.peers is empty" in line
    assert "--peers ADDRESS" in line


def test_bootstrap_peer_that_never_says_a_word(fail: Fail) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{NOBODY}"
        started = time.monotonic()
        line = fail(NO_SWARM, peers=[address], sets=["swarm.startup_timeout_s=3.0"])
        assert time.monotonic() - started < 60
    assert f"swarm.peers {address}: none answered: check" in line


def test_key_file_of_another_process(fail: Fail, tmp_path: Path) -> None:
    key_file = tmp_path / "shared.key"
    holder = Swarm(SwarmConfig(identity=str(key_file)), tmp_path / "holder")
    try:
        line = fail(WRONG_SETTINGS, sets=[f"swarm.identity={key_file}"])
    finally:
        holder.close()
    assert f"swarm.identity {key_file} is in use by another process: give each peer " in line
    os.close(Identity.load_or_create(key_file).claim(wait_s=0.0))  # free again


def test_key_file_of_another_process_leaves_its_addresses_where_they_are(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    files = [tmp_path / "out" / "addresses", tmp_path / "file"]
    for file in files:
        file.write_text("mine")
    with Swarm(SwarmConfig(), tmp_path / "out"):
        line = fail(WRONG_SETTINGS, "--address-file", str(files[1]))
    assert "is in use by another process" in line
    assert [file.read_text() for file in files] == ["mine", "mine"]


def test_peers_that_are_only_this_peer_itself(fail: Fail, tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "out" / "identity.key")
    line = fail(WRONG_SETTINGS, peers=[f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}"])
    assert f"swarm.peers names only this peer itself ({identity.peer_id}): name another one" in line
    assert "swarm.identity" in line


def test_address_that_is_not_of_this_machine(fail: Fail) -> None:
    line = fail(WRONG_SETTINGS, sets=['swarm.host_maddrs=["/ip4/198.51.100.7/tcp/0"]'])
    assert "swarm.host_maddrs 198.51.100.7: " in line
    assert "name an address of this machine" in line


def test_more_threads_than_cores(fail: Fail) -> None:
    line = fail(WRONG_SETTINGS, sets=["compute.threads=4096"])
    assert line.startswith("opendiloco: compute.threads is 4096, and this machine has")


def test_contract_of_ones_own_that_differs(
    fail: Fail, network: Network, tmp_path: Path, make_contract: SmallContract
) -> None:
    theirs = make_contract()
    mine = theirs.model_copy(update={"inner": InnerConfig(steps=7, batch_size=2)})
    write_toml(tmp_path / "mine.toml", mine)
    line = fail(WRONG_SETTINGS, "--run", str(tmp_path / "mine.toml"), peers=start_run(network, theirs))
    assert "inner.steps is 7 here and 3 in run test" in line
    assert "join with the run's own contract (leave out --run)" in line


def test_setting_of_ones_own_that_differs(fail: Fail, network: Network, make_contract: SmallContract) -> None:
    addresses = start_run(network, make_contract())
    line = fail(WRONG_SETTINGS, peers=addresses, sets=["inner.lr=0.5", "outer.codec=fp16"])
    assert "inner.lr is 0.5 here and 0.0004 in run test (1 more differ)" in line
    assert "leave out --set inner.lr and --set outer.codec" in line


def test_folder_that_takes_no_files_is_told_before_the_network_is_joined(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "out" / ".peer.toml.tmp").mkdir(parents=True)  # as a full disk would
    line = fail(WRONG_SETTINGS)
    assert re.search(r"cannot write .*peer\.toml: Is a directory: choose another --out", line)
    assert "a swarm" not in (tmp_path / "out" / "log.txt").read_text()


def test_several_runs_and_none_named(fail: Fail, network: Network, make_contract: SmallContract) -> None:
    addresses = start_run(network, make_contract(run="north"))
    start_run(network, make_contract(run="south"), addresses)
    line = fail(WRONG_SETTINGS, peers=addresses)
    assert "the swarm has runs north, south: choose one with --run-id" in line


def test_only_other_runs(fail: Fail, network: Network, make_contract: SmallContract) -> None:
    addresses = start_run(network, make_contract(run="north"))
    start_run(network, make_contract(run="south"), addresses)
    line = fail(NO_SWARM, "--run-id", "west", peers=addresses, sets=["swarm.startup_timeout_s=5.0"])
    assert "0 peers of run west; the swarm has runs north, south: " in line


def test_other_initial_parameters_are_refused_before_the_first_inner_step(
    fail: Fail, network: Network, tmp_path: Path, make_contract: SmallContract
) -> None:
    contract = make_contract()
    vocab_size = load_tokenizer(contract.data.tokenizer).vocab_size
    model = build_model(ModelConfig(), vocab_size=vocab_size, seq_len=contract.data.seq_len, seed=0)
    worker = network.peer().open()
    worker.enter(contract, layout=FlatLayout.of(model).digest, position=Position(0, "f" * 64, "f" * 64))
    line = fail(WRONG_SETTINGS, peers=worker.addresses, sets=["compute.threads=1"])
    assert "initial parameters" in line
    assert f"differ from {'f' * 12} of peer {worker.peer_id}" in line
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == ""


def test_key_that_another_process_of_the_swarm_uses(
    fail: Fail, network: Network, tmp_path: Path, make_contract: SmallContract
) -> None:
    """A copied folder: another file, the same key, and so the same peer id twice.

    Either a record tells of the other process, or the swarm, whose first call goes to that one, finds nobody here.
    """
    contract = make_contract().model_copy(update={"rounds": RoundsConfig(start_peers=2)})
    bootstrap = network.peer().open()
    original, copy = tmp_path / "original.key", tmp_path / "copy.key"
    worker = network.peer(bootstrap.addresses, key_file=original).open()
    worker.enter(contract)
    copy.write_bytes(original.read_bytes())
    copy.chmod(0o600)
    line = fail(WRONG_SETTINGS, peers=bootstrap.addresses, sets=[f"swarm.identity={copy}", "compute.threads=1"])
    assert re.search(
        rf"swarm\.identity {re.escape(str(copy))} is (in use by another process|another process's key)", line
    )
