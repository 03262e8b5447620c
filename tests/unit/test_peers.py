"""Profiles and recipes in peers/: they parse, say what a peer is and nothing of the run, and start what they should."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from opendiloco.cli import main
from opendiloco.config import PeerConfig
from opendiloco.launcher import EXIT_FILE
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


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_peer_of_any_profile_can_take_part_from_another_machine(profile: Path) -> None:
    """It is a client, or listens for others; one that others cannot reach and is no client ends with 64."""
    swarm = load_settings(None, profile, ["compute.device=cpu"]).peer.swarm
    assert swarm.client_mode or all("/127." not in address for address in swarm.host_maddrs)


def test_the_command_for_a_volunteer_needs_no_open_port() -> None:
    text = (PEERS / "local" / "README.md").read_text()
    command = next(line for line in text.splitlines() if line.startswith("peers/local/keep.py opendiloco train"))
    profile = re.search(r"--peer (\S+) --peers ADDRESS ", command)
    assert profile is not None
    assert load_settings(None, ROOT / profile[1], []).peer.swarm.client_mode


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


def keep(*command: str, **settings: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "KEEP_PAUSE_S": "0", **settings}
    return subprocess.Popen([str(KEEP), *command], stderr=subprocess.PIPE, text=True, env=environment)


def ended_with(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize("code", [0, 64])
def test_a_peer_that_is_done_or_set_wrong_is_not_started_again(code: int) -> None:
    assert ended_with(keep(sys.executable, "-c", f"raise SystemExit({code})")) == (code, "")


@pytest.mark.parametrize("name", ["KEEP_PAUSE_S", "KEEP_MOST_S"])
@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf", "1e9"])
def test_a_pause_that_is_none_is_told_of_in_a_line(name: str, value: str) -> None:
    wrong = f"keep.py: {name} is {value}: give seconds from 0 to 86400\n"
    assert ended_with(keep(sys.executable, "-c", "raise SystemExit(75)", **{name: value})) == (64, wrong)


def test_a_command_that_cannot_be_run_is_told_of_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in (str(tmp_path / "none"), str(tmp_path / "file"), str(tmp_path)):
        code, errors = ended_with(keep(command))
        assert (code, errors.count("\n")) == (64, 1)
        assert errors.startswith(f"keep.py: cannot run {command}: ")


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_peer_that_had_no_handlers_yet_has_left_on_request(number: signal.Signals, tmp_path: Path) -> None:
    up = tmp_path / "up"
    os.mkfifo(up)
    script = f"import signal, time; signal.signal({int(number)}, signal.SIG_DFL); open({str(up)!r}, 'w').close()"
    process = keep(sys.executable, "-c", f"{script}; time.sleep(60)")
    up.read_bytes()
    process.send_signal(number)
    assert ended_with(process) == (0, "")


TORCHRUN = """
import os, signal, sys, time
up, told, code = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
with open(os.environ["OPENDILOCO_EXIT_FILE"], "a") as file:
    file.write(told.replace(",", "\\n") + "\\n" * bool(told))
if up:
    open(up, "w").close()
    time.sleep(60)
sys.exit(int(code))
"""
"""What torchrun is to keep.py: its processes tell, and it ends with 1 itself, also when it is asked to end."""


@pytest.mark.parametrize(
    ("told", "expected", "starts"),
    [
        ("0 began,0 64", 64, 1),
        ("0 began,1 64,0 0", 64, 1),  # torchrun has the first one leave when another one has failed
    ],
)
def test_wrong_settings_are_known_through_torchrun(told: str, expected: int, starts: int) -> None:
    code, errors = ended_with(keep(sys.executable, "-c", TORCHRUN, "", told, "1"))
    assert (code, errors.count("starts again")) == (expected, starts - 1)


@pytest.mark.parametrize(
    ("told", "shown"),
    [("0 began,0 75", 75), ("0 began", 1), ("", 1), ("0 began,1 75,0 0", 1)],  # the last: 1 is gone, nobody asked 0
)
def test_a_failure_under_torchrun_is_no_end(told: str, shown: int) -> None:
    process = keep(sys.executable, "-c", TORCHRUN, "", told, "1", KEEP_PAUSE_S="100")
    assert process.stderr is not None
    assert f"ended with {shown}, starts again" in process.stderr.readline()
    process.terminate()
    assert process.wait(10) == 0
    process.stderr.close()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("0 began,0 0,1 0", 0),
        ("", 0),  # before it had begun
        ("0 began", 1),  # killed while it left
        ("0 began,0 75", 75),
        ("0 began,0 64", 64),
    ],
)
def test_a_request_to_leave_through_torchrun_ends_with_the_workers_code(
    told: str, expected: int, tmp_path: Path
) -> None:
    up = tmp_path / "up"
    os.mkfifo(up)
    process = keep(sys.executable, "-c", TORCHRUN, str(up), told, "1")
    up.read_bytes()
    process.terminate()
    assert ended_with(process)[0] == expected


def test_processes_of_a_worker_tell_how_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opendiloco.ranks import Ranks  # seconds of importing

    told = tmp_path / "told"
    monkeypatch.setenv(EXIT_FILE, str(told))
    assert main(["train", "--set", "no.such=1"]) == 64
    monkeypatch.setenv("RANK", "1")
    assert main(["version"]) == 0
    monkeypatch.setenv("RANK", "0")
    for index in range(2):
        with Ranks(index, 2):
            pass
    assert told.read_text() == "0 64\n1 0\n0 began\n"
    monkeypatch.setenv(EXIT_FILE, str(tmp_path / "none" / "told"))
    assert main(["version"]) == 0  # a file that cannot be written is no failure


def test_a_real_worker_behind_a_launcher_that_says_1_is_not_started_again() -> None:
    script = "import os, subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]]); sys.exit(1)"
    command = (sys.executable, "-c", script, "-m", "opendiloco", "train", "--set", "no.such=1")
    code, errors = ended_with(keep(*command))
    assert code == 64
    assert "starts again" not in errors


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
    process = keep(sys.executable, "-c", "raise SystemExit(75)", KEEP_PAUSE_S="100")
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


def unit_settings() -> dict[str, list[str]]:
    """The service's settings, each with all of its values."""
    lines = (PEERS / "systemd" / "opendiloco@.service").read_text().splitlines()
    found: dict[str, list[str]] = {}
    for key, equals, value in (line.partition("=") for line in lines if not line.startswith("#")):
        if equals:
            found.setdefault(key, []).append(value)
    return found


def test_the_service_may_write_wherever_it_is_told_to() -> None:
    """Under a user of its own the rest of the file system is read-only."""
    unit = unit_settings()
    (command,) = unit["ExecStart"]
    variables = [value.partition("=")[2] for value in unit["Environment"]]
    example = (PEERS / "systemd" / "example.env").read_text()
    variables += re.findall(r"^\w+=(/\S+)$", example, re.MULTILINE)
    granted = {f"/var/lib/{unit['StateDirectory'][0]}", f"/var/cache/{unit['CacheDirectory'][0]}"}
    named = {*shlex.split(command)[1:], *unit["WorkingDirectory"], *variables}
    written = {word for word in named if word.startswith("/") and not word.startswith(("/opt/opendiloco/", "/ip4/"))}
    assert written == granted
    assert any(value.startswith("HOME=/") for value in unit["Environment"])  # where caches are by default
    assert all(path.endswith("/%i") for path in granted)  # of one user each


def test_the_service_waits_for_a_clock_that_somebody_sets() -> None:
    """Nothing holds time-sync.target up by itself (systemd.special(7))."""
    unit = unit_settings()
    assert "time-sync.target" in unit["After"][0].split()
    assert {"time-sync.target", "systemd-time-wait-sync.service"} <= set(unit["Wants"][0].split())
    readme = (PEERS / "systemd" / "README.md").read_text()
    assert "systemctl enable chrony-wait.service" in readme


def test_the_image_is_sound() -> None:
    hadolint = Path(sys.prefix) / "bin" / "hadolint"
    found = subprocess.run([str(hadolint), str(PEERS / "docker" / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_files_of_compose_and_skypilot_start_a_worker_through_addresses_that_are_given() -> None:
    compose = yaml.safe_load((PEERS / "docker" / "compose.yaml").read_text())
    worker = compose["services"]["worker"]
    assert worker["command"].startswith("train --peer /opt/opendiloco/peers/profiles/public.toml")
    assert worker["command"].endswith("--peers ${PEERS:?name addresses of a peer of the swarm} ${OPTIONS:-}")
    assert (ROOT / "peers" / "docker" / worker["build"]["context"]).resolve() == ROOT
    assert (worker["init"], set(compose["volumes"])) == (True, {"peer"})
    task = yaml.safe_load((PEERS / "skypilot" / "worker.yaml").read_text())
    assert (ROOT / task["envs"]["PROFILE"]).is_file()
    assert task["envs"]["PEERS"] is None  # has to be given
    bash = subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], capture_output=True, text=True)
    assert bash.returncode == 0, bash.stderr


def interpolated(text: str, variables: dict[str, str]) -> str:
    """A value of a compose file as `docker compose` has it, of what ours uses: ${X:-words} and ${X:?message}."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1]) or found[2], text)
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: variables[found[1]], text)


@pytest.mark.parametrize(
    ("variables", "announced"),
    [({}, ()), ({"ANNOUNCE": '["/ip4/203.0.113.7/tcp/4001"]'}, ("/ip4/203.0.113.7/tcp/4001",))],
)
def test_compose_announces_what_it_is_given(variables: dict[str, str], announced: tuple[str, ...]) -> None:
    command = yaml.safe_load((PEERS / "docker" / "compose.yaml").read_text())["services"]["worker"]["command"]
    words = shlex.split(interpolated(command, {"PEERS": "/ip4/a /ip4/b", "OPTIONS": "--run-id a", **variables}))
    assert words[-5:] == ["--peers", "/ip4/a", "/ip4/b", "--run-id", "a"]
    changes = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    assert load_settings(None, PEERS / "profiles" / "public.toml", changes).peer.swarm.announce_maddrs == announced


class Clone:
    """A folder with the recipes and stand-ins for what .venv/bin and the system hold."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.bin = self.root / ".venv" / "bin"
        self.bin.mkdir(parents=True)
        (self.root / "peers").symlink_to(PEERS)
        self.put("srun", SRUN)
        self.put("scontrol", "echo ' PreemptTime=None'")
        self.environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "KEEP_PAUSE_S": "0"}

    def put(self, name: str, text: str) -> None:
        """A program of that name, in bash."""
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        environment = {**self.environment, **variables}
        return subprocess.Popen(command, cwd=self.root, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("answer", ["exit 22", "exit 0", "echo '<html>please log in</html>'"])
def test_a_rented_machine_whose_address_is_not_known_asks_again(clone: Clone, answer: str) -> None:
    task = yaml.safe_load((PEERS / "skypilot" / "worker.yaml").read_text())
    clone.put("curl", f"[[ -e asked ]] && echo 203.0.113.7 || {{ touch asked; {answer}; }}")
    clone.put("opendiloco", "printf '%s\\n' \"$@\" >words")
    variables = {"PEERS": "/ip4/a /ip4/b", "PROFILE": task["envs"]["PROFILE"]}
    code, errors = ended_with(clone.start("bash", "-c", task["run"], **variables))
    assert (code, errors.count("ended with 75, starts again")) == (0, 1), errors
    words = (clone.root / "words").read_text().splitlines()
    assert words[:6] == ["train", "--peer", "peers/profiles/spot.toml", "--peers", "/ip4/a", "/ip4/b"]
    assert words[-2:] == ["--set", 'swarm.announce_maddrs=["/ip4/203.0.113.7/tcp/4001"]']


SRUN = """
while [[ $1 == --* ]]; do shift; done
(echo "$BASHPID" >task; exec "$@") &
trap 'kill -KILL $!' TERM
wait $!
"""
"""A step of Slurm's: an srun that is told to end kills it."""
WORKER = "trap 'sleep 0.3; echo left >>ends; exit 0' TERM; cat up; while true; do sleep 0.05; done"


def batch(clone: Clone, **variables: str) -> subprocess.Popen[str]:
    script = str(PEERS / "slurm" / "worker.sbatch")
    job = {"SLURM_SUBMIT_DIR": str(clone.root), "SLURM_JOB_NAME": "a", "SLURM_JOB_ID": "7"}
    return clone.start("bash", script, "/ip4/a", **{**job, **variables})


@pytest.mark.parametrize("with_script", [False, True], ids=["time limit or grace time", "scancel or preemption"])
def test_slurms_sigterm_has_the_worker_leave_in_order(clone: Clone, with_script: bool) -> None:
    """Before the time limit, and at the beginning of a grace time, Slurm tells steps alone, else the script as well."""
    text = (PEERS / "slurm" / "worker.sbatch").read_text()
    assert re.findall(r"^#SBATCH --signal=(\S+)$", text, re.MULTILINE) == ["TERM@120"]  # B: is the script alone
    os.mkfifo(clone.root / "up")
    clone.put("opendiloco", WORKER)
    process = batch(clone)
    (clone.root / "up").write_text("")
    task = int((clone.root / "task").read_text())
    if with_script:
        process.terminate()
    os.kill(task, signal.SIGTERM)
    assert ended_with(process)[0] == 0
    assert (clone.root / "ends").read_text() == "left\n"


@pytest.mark.parametrize(
    ("code", "preempted", "again"), [(0, True, True), (75, True, True), (0, False, False), (64, True, False)]
)
def test_a_job_that_left_because_it_is_preempted_is_queued_again(
    clone: Clone, code: int, preempted: bool, again: bool
) -> None:
    """It may leave long before the end of the grace time, at which alone Slurm would queue it again."""
    since = "2026-12-01T01:36:51" if preempted else "None"
    shown = f"echo '   PreemptEligibleTime=2026-12-01T01:36:46 PreemptTime={since}'"
    clone.put("scontrol", f'if [[ $1 == requeue ]]; then echo "$2" >queued; else {shown}; fi')
    clone.put("srun", f"exit {code}")
    assert ended_with(batch(clone))[0] == code
    assert (clone.root / "queued").exists() == again


def test_a_job_on_several_gpus_ends_with_the_workers_code(clone: Clone) -> None:
    clone.put("torchrun", 'printf "%s\\n" "$@" >words; echo 0 64 >>"$OPENDILOCO_EXIT_FILE"; exit 1')
    code, errors = ended_with(batch(clone, SLURM_GPUS_ON_NODE="2"))
    assert (code, errors) == (64, "")
    words = (clone.root / "words").read_text().splitlines()
    assert words[:7] == ["--standalone", "--nproc-per-node", "2", "-m", "--", "opendiloco", "train"]
    assert words[-5:] == ["/ip4/a", "--out", f"{clone.root}/runs/a-7", "--resume", "latest"]
