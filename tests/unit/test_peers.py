"""Profiles and recipes in peers/: they parse, say what a peer is and nothing of the run, and start what they should."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from opendiloco.config import PeerConfig
from opendiloco.ready import VARIABLE, tell_ready
from opendiloco.settings import load_settings

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "peers"
PROFILES = sorted((PEERS / "profiles").glob("*.toml"))
KEEP = PEERS / "local" / "keep.py"
RECIPES = ("local", "docker", "systemd", "slurm", "skypilot")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_holds_settings_of_a_peer_and_names_the_command_that_takes_it(profile: Path) -> None:
    settings = load_settings(None, profile, ["compute.device=cpu"])  # where there is no GPU
    assert set(tomllib.loads(profile.read_text())) <= set(PeerConfig.model_fields)
    assert settings.peer != PeerConfig()
    assert f"--peer peers/profiles/{profile.name}" in profile.read_text()
    assert f"`{profile.name}`" in (PEERS / "README.md").read_text()


def test_all_profiles_and_recipes_are_there() -> None:
    assert {path.stem for path in PROFILES} == {"laptop", "public", "nat", "spot", "gpu", "bootstrap"}
    for name in RECIPES:
        assert len((PEERS / name / "README.md").read_text().splitlines()) <= 40
        assert f"| `{name}/` |" in (PEERS / "README.md").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_files_that_are_there_and_ends_in_train(name: str) -> None:
    text = "".join(path.read_text() for path in sorted((PEERS / name).iterdir()))
    for file in set(re.findall(r"(?<![\w.])peers/[\w./@-]*\w", text)):
        assert (ROOT / file).exists(), file
    assert re.search(r"opendiloco train\b|\[\"train\", ", text)


def keep(*command: str, pause_s: int = 0) -> subprocess.Popen[str]:
    environment = {**os.environ, "KEEP_PAUSE_S": str(pause_s)}
    return subprocess.Popen([str(KEEP), *command], stderr=subprocess.PIPE, text=True, env=environment)


def ended_with(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize("code", [0, 64])
def test_a_peer_that_is_done_or_set_wrong_is_not_started_again(code: int) -> None:
    assert ended_with(keep(sys.executable, "-c", f"raise SystemExit({code})")) == (code, "")


@pytest.mark.parametrize("failure", ["raise SystemExit(75)", "raise SystemExit(1)", "os.kill(os.getpid(), 9)"])
def test_a_peer_that_failed_is_started_again_until_it_is_done(failure: str, tmp_path: Path) -> None:
    script = f"import os, pathlib\npath = pathlib.Path({str(tmp_path / 'count')!r})\n"
    script += (
        f"path.write_text((path.read_text() if path.exists() else '') + 'x')\nif len(path.read_text()) < 3: {failure}"
    )
    code, errors = ended_with(keep(sys.executable, "-c", script))
    assert (code, len((tmp_path / "count").read_text())) == (0, 3)
    assert errors.count("starts again") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_to_leave_reaches_the_peer_and_its_code_comes_back(number: signal.Signals, tmp_path: Path) -> None:
    up = tmp_path / "up"
    os.mkfifo(up)
    script = (
        "import signal, time, sys\n"
        f"signal.signal({int(number)}, lambda *_: (time.sleep(0.3), sys.exit(7)))\n"
        f"open({str(up)!r}, 'w').close()\n"
        "time.sleep(60)"
    )
    process = keep(sys.executable, "-c", script)
    up.read_bytes()  # it is there
    process.send_signal(number)
    assert ended_with(process)[0] == 7


def test_under_nohup_the_end_of_the_terminal_is_no_request_to_leave(tmp_path: Path) -> None:
    up, go = tmp_path / "up", tmp_path / "go"
    os.mkfifo(up)
    os.mkfifo(go)
    script = f"open({str(up)!r}, 'w').close(); open({str(go)!r}).read()"
    command = ["sh", "-c", 'trap \'\' HUP; exec "$0" "$@"', str(KEEP), sys.executable, "-c", script]
    with subprocess.Popen(command) as process:
        up.read_bytes()
        process.send_signal(signal.SIGHUP)
        go.write_text("on")
        assert process.wait(10) == 0


def test_a_request_to_leave_during_a_pause_ends_it_at_once() -> None:
    process = keep(sys.executable, "-c", "raise SystemExit(75)", pause_s=100)
    assert process.stderr is not None
    assert "starts again in 100 s" in process.stderr.readline()
    process.terminate()
    assert process.wait(10) == 0
    process.stderr.close()


@pytest.mark.parametrize("kind", ["file", "abstract"])
def test_systemd_is_told_when_a_peer_can_be_joined(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "s") if kind == "file" else f"@opendiloco-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + path[1:] if path[0] == "@" else path)
        manager.settimeout(5)
        monkeypatch.setenv(VARIABLE, path)
        tell_ready()
        assert manager.recv(100) == b"READY=1"
    tell_ready()  # nobody listens any more
    monkeypatch.setenv(VARIABLE, "")
    tell_ready()


@pytest.mark.parametrize("script", ["peers/slurm/worker.sbatch", "launch.sh", ".ci/run"])
def test_shell_scripts_are_sound(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True).returncode == 0
    shellcheck = Path(sys.prefix) / "bin" / "shellcheck"
    found = subprocess.run([str(shellcheck), str(ROOT / script)], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_service_is_sound(tmp_path: Path) -> None:
    """By systemd's own check, where it is installed, with paths that are there."""
    unit = (PEERS / "systemd" / "opendiloco@.service").read_text()
    assert "RestartPreventExitStatus=64" in unit
    if shutil.which("systemd-analyze") is None:
        return
    copy = tmp_path / "opendiloco@mine.service"
    copy.write_text(re.sub(r"/opt/\S+/opendiloco ", f"{sys.executable} ", unit))
    found = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    newer = re.compile(r"Unknown key '(RestartSteps|RestartMaxDelaySec)'")  # than systemd 253
    assert [line for line in found.stderr.splitlines() if copy.name in line and not newer.search(line)] == []


def test_the_image_is_sound() -> None:
    hadolint = Path(sys.prefix) / "bin" / "hadolint"
    found = subprocess.run([str(hadolint), str(PEERS / "docker" / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_files_of_compose_and_skypilot_start_a_worker_through_addresses_that_are_given() -> None:
    compose = yaml.safe_load((PEERS / "docker" / "compose.yaml").read_text())
    worker = compose["services"]["worker"]
    assert worker["command"].startswith("train --peer /opt/opendiloco/peers/profiles/public.toml")
    assert worker["command"].endswith("--peers ${PEERS:?name addresses of a peer of the swarm}")
    assert (ROOT / "peers" / "docker" / worker["build"]["context"]).resolve() == ROOT
    assert (worker["init"], set(compose["volumes"])) == (True, {"peer"})
    task = yaml.safe_load((PEERS / "skypilot" / "worker.yaml").read_text())
    assert (ROOT / task["envs"]["PROFILE"]).is_file()
    assert task["envs"]["PEERS"] is None  # has to be given
    assert "peers/local/keep.py opendiloco train" in task["run"]
    bash = subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], capture_output=True, text=True)
    assert bash.returncode == 0, bash.stderr
