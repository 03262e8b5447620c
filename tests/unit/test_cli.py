"""The command line: fast help, one line per error, exit codes, and what reaches the functions behind it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from opendiloco.cli import main
from opendiloco.config import Contract
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.options import spread_peers

A, B, C = (f"/ip4/203.0.113.{number}/tcp/1/p2p/12D3KooW{number}" for number in range(3))
COMMANDS = ["bootstrap", "train", "simulate", "eval", "generate", "export", "settings", "version"]

Behind = Callable[..., Any]
Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Behind:
    """Replaces a function behind a command; returns the list of its calls."""

    def replace(module: str, function: str, result: int | BaseException = 0) -> Calls:
        calls: Calls = []

        def fake(*args: object, **kwargs: object) -> int:
            calls.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        stand_in = ModuleType(f"opendiloco.{module}")
        setattr(stand_in, function, fake)
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        return calls

    return replace


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("opendiloco: ")
    return printed.err.removeprefix("opendiloco: ").rstrip("\n")


def test_help_of_every_command_imports_nothing_heavy() -> None:
    code = f"""
import sys
from opendiloco.cli import main
for command in {COMMANDS!r}:
    assert main([command, "--help"]) == 0
assert main(["settings"]) == 0
heavy = {{"torch", "hivemind", "transformers", "datasets", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("--peers", "--address-file", "--workers", "--max-new-tokens", "--host-maddr", "inner.steps = 50"):
        assert name in done.stdout


def test_help_documents_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("bootstrap", "train", "simulate", "eval", "generate", "export"):
        assert main([command, "-h"]) == 0
        text = capsys.readouterr().out
        options = text[text.index("Options:") : text.index("--debug")].replace("\n   ", " ").split("\n  --")[1:]
        assert options
        for option in options:
            described = "default" in option.lower() or option.startswith("set ")
            assert described, f"{command} --{option}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing command: see `opendiloco --help`"),
        (["train", "--foo"], "No such option: --foo"),
        (["trane"], "No such command 'trane'"),
        (["generate"], "Missing argument 'MODEL_DIR': see `opendiloco generate --help`"),
        (["simulate", "--workers", "many"], "Invalid value for '--workers'"),
        (["simulate", "--workers", "0"], "Invalid value for '--workers'"),
        (["train", "--peers", "--out", "x"], "--peers has no address: give those of a peer"),
        (["train", "--peers", "a"], 'swarm.peers is ["a"] in --peers: must be a list'),
        (["train", "--run", "none.toml"], "none.toml does not exist: give an existing file with --run"),
        (["train", "--set", "inner.step=1"], "unknown setting inner.step in --set: did you mean inner.steps?"),
        (["train", "--run-id", ""], 'run.id is "" in --run-id: must be 1 to 64'),
        (["bootstrap", "--host-maddr", "0.0.0.0:1"], 'swarm.host_maddrs is ["0.0.0.0:1"] in --host-maddr: must be'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_line_is_one_line_and_exit_code_64(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(arguments) == 64
    assert error_line(capsys).startswith(line)


@pytest.mark.parametrize(("error", "code"), [(SettingsError("a\nb"), 64), (SwarmError("a b"), 75)])
def test_an_error_for_the_user_is_its_line_and_its_exit_code(
    behind: Behind, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    behind("trainer", "run_worker", error)
    assert main(["train"]) == code
    assert error_line(capsys) == "a b"


def test_an_unexpected_error_is_one_line_and_its_traceback_is_in_the_log(
    behind: Behind, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    behind("trainer", "run_worker", ValueError("what\nnow"))
    (tmp_path / "log.txt").write_text("before\n")
    assert main(["train", "--out", str(tmp_path)]) == 1
    assert error_line(capsys) == f"unexpected ValueError: what now: the traceback is in {tmp_path / 'log.txt'}"
    text = (tmp_path / "log.txt").read_text()
    assert text.startswith("before\nTraceback")
    assert "run_worker" in text


def test_an_unexpected_error_without_a_log_asks_for_debug_which_prints_the_traceback(
    behind: Behind, capsys: pytest.CaptureFixture[str]
) -> None:
    behind("evaluate", "run_generate", RuntimeError("boom"))
    assert main(["generate", "model", "text"]) == 1
    assert error_line(capsys) == "unexpected RuntimeError: boom: run again with --debug for the traceback"
    assert main(["generate", "model", "text", "--debug"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith("opendiloco: unexpected RuntimeError: boom: the traceback is above\n")


def test_exit_code_of_the_function_is_that_of_the_command(behind: Behind) -> None:
    behind("trainer", "run_worker", 75)
    assert main(["train"]) == 75


def test_ctrl_c_ends_a_command_that_is_no_peer_with_130(behind: Behind, capsys: pytest.CaptureFixture[str]) -> None:
    behind("simulate", "run_simulation", KeyboardInterrupt())
    assert main(["simulate"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("train", signal.SIGTERM, 0),
        ("train", signal.SIGINT, 0),
        ("train", signal.SIGHUP, 0),
        ("bootstrap", signal.SIGTERM, 0),
        ("simulate", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_a_peer_that_is_asked_to_leave_while_its_modules_load_ends_with_0(
    command: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Modules that swallow what is raised while they load are many."""
    module = {"train": "trainer"}.get(command, command)
    (tmp_path / "script.py").write_text(
        f"""
import os, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "opendiloco.{module}":
            try:
                os.kill(os.getpid(), {number:d})
            except BaseException:
                pass
            os._exit(99)
sys.meta_path.insert(0, Finder)
sys.argv[1:] = ["{command}"]
from opendiloco.__main__ import run
run()
"""
    )
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (code, "")


def test_train_hands_on_settings_and_options(behind: Behind, tmp_path: Path) -> None:
    calls = behind("trainer", "run_worker")
    peer = tmp_path / "peer.toml"
    peer.write_text('[swarm]\npeers = ["/never/p2p/used"]\nheartbeat_s = 1.0\n')
    arguments = ["train", "--peer", str(peer), "--peers", A, B, "--run-id", "mine", "--set", "inner.steps=3"]
    assert main([*arguments, "--peers", C, "--resume", "latest", "--address-file", "a.addr"]) == 0
    ((settings, out), options) = calls[0]
    assert settings.peer.swarm.peers == (A, B, C)
    assert settings.peer.swarm.heartbeat_s == 1.0
    assert settings.explicit == {"run.id", "inner.steps"}
    assert settings.options == {"run.id": "--run-id", "inner.steps": "--set inner.steps"}
    assert out == Path("runs/mine")
    assert options == {"run_id": "mine", "resume": "latest", "address_file": Path("a.addr")}


def test_train_without_peers_keeps_those_of_the_peer_file(behind: Behind, tmp_path: Path) -> None:
    calls = behind("trainer", "run_worker")
    (tmp_path / "peer.toml").write_text(f'[swarm]\npeers = ["{A}"]\n')
    assert main(["train", "--peer", str(tmp_path / "peer.toml"), "--out", str(tmp_path)]) == 0
    ((settings, out), options) = calls[0]
    assert (settings.peer.swarm.peers, out) == ((A,), tmp_path)
    assert options == {"run_id": None, "resume": None, "address_file": None}


@pytest.mark.parametrize(("options", "takes"), [([], False), (["--resume", "latest"], True), (["--peers", A], False)])
def test_train_that_resumes_by_itself_takes_the_settings_of_its_folder(
    behind: Behind, tmp_path: Path, options: list[str], takes: bool
) -> None:
    calls = behind("trainer", "run_worker")
    (tmp_path / "run.toml").write_text('[run]\nid = "mine"\nrounds = 77\n')
    assert main(["train", "--out", str(tmp_path), *options, *(["--resume", "latest"] if A in options else [])]) == 0
    (((settings, _), _),) = calls
    assert settings.has_run_file == takes
    assert settings.contract.run.rounds == (77 if takes else Contract().run.rounds)


@pytest.mark.parametrize("peers", [[], [B]])
def test_train_that_resumes_keeps_its_own_settings_but_for_whom_it_joins(
    behind: Behind, tmp_path: Path, peers: list[str]
) -> None:
    calls = behind("trainer", "run_worker")
    kept = f'[swarm]\npeers = ["{A}"]\nheartbeat_s = 1.0\n[checkpoint]\nevery_rounds = 3\nkeep = 5\n'
    (tmp_path / "peer.toml").write_text(kept)
    options = ["--resume", "latest", "--set", "checkpoint.keep=7", *(["--peers", *peers] if peers else [])]
    assert main(["train", "--out", str(tmp_path), *options]) == 0
    (((settings, _), _),) = calls
    peer = settings.peer
    assert (peer.swarm.heartbeat_s, peer.checkpoint.every_rounds, peer.checkpoint.keep) == (1.0, 3, 7)
    assert peer.swarm.peers == tuple(peers)
    other = tmp_path / "other.toml"
    other.write_text("[checkpoint]\nevery_rounds = 9\n")
    assert main(["train", "--out", str(tmp_path), *options, "--peer", str(other)]) == 0
    assert calls[1][0][0].peer.checkpoint.every_rounds == 9
    assert calls[1][0][0].peer.swarm.heartbeat_s != 1.0


def test_bootstrap_hands_on_its_addresses(behind: Behind) -> None:
    calls = behind("bootstrap", "run_bootstrap")
    listen, announce = "/ip4/0.0.0.0/tcp/5", "/dns4/example.org/tcp/5"
    arguments = ["bootstrap", "--host-maddr", listen, "--announce-maddr", announce, "--identity", "key"]
    assert main([*arguments, "--address-file", "f", "--peers", A]) == 0
    ((swarm, out, address_file), _) = calls[0]
    assert (swarm.host_maddrs, swarm.announce_maddrs) == ((listen,), (announce,))
    assert (swarm.identity, swarm.peers) == ("key", (A,))
    assert (out, address_file) == (None, Path("f"))


def test_simulate_eval_and_generate_hand_on_their_options(behind: Behind, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[data]\nseq_len = 77\n")
    simulation, evaluation = behind("simulate", "run_simulation"), behind("evaluate", "run_eval")
    assert main(["simulate", "--workers", "2", "--out", "o", "--set", "inner.steps=9"]) == 0
    ((contract, compute), options) = simulation[0]
    assert (contract.inner.steps, compute.device) == (9, "auto")
    assert options == {"workers": 2, "out": Path("o")}

    assert main(["eval", str(tmp_path / "model")]) == 0
    ((model, data), _) = evaluation[0]
    assert (model, data.seq_len) == (tmp_path / "model", 77)

    generation = behind("evaluate", "run_generate")
    assert main(["generate", "m", "Hello", "--temperature", "0", "--max-new-tokens", "5"]) == 0
    assert generation == [((Path("m"), "Hello"), {"max_new_tokens": 5, "temperature": 0.0, "seed": 0})]


def test_export_and_tasks_hand_on_their_options(behind: Behind) -> None:
    exported, tasks = behind("export", "run_export"), behind("harness", "run_tasks")
    assert main(["export", "out", "hf"]) == main(["export", "out", "hf", "--checkpoint", "latest", "--dtype", "bf16"])
    assert exported == [
        ((Path("out"), Path("hf")), {"checkpoint": None, "dtype": "fp32"}),
        ((Path("out"), Path("hf")), {"checkpoint": "latest", "dtype": "bf16"}),
    ]
    assert main(["eval", "m", "--tasks", "a,b", "--task-dir", "t", "--set", "compute.device=cpu"]) == 0
    ((arguments, options),) = tasks
    assert arguments == (Path("m"), "a,b")
    assert (options["task_dir"], options["compute"].device) == (Path("t"), "cpu")


@pytest.mark.parametrize(
    ("module", "function", "command"),
    [
        ("evaluate", "run_eval", ["eval", "m"]),
        ("harness", "run_tasks", ["eval", "m", "--tasks", "a"]),
        ("evaluate", "run_generate", ["generate", "m", "Hello"]),
        ("export", "run_export", ["export", "out", "hf"]),
    ],
)
def test_what_libraries_log_is_not_on_the_console_of_a_command(
    behind: Behind,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    function: str,
    command: list[str],
) -> None:
    behind(module, function)
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "handlers", [])
    library.addHandler(logging.StreamHandler(sys.stderr))

    def work(*_: object, **__: object) -> int:
        library.warning("no kernels")
        logging.getLogger("opendiloco.evaluate").warning("careful")
        return 0

    monkeypatch.setattr(sys.modules[f"opendiloco.{module}"], function, work)
    assert main(command) == 0
    assert capsys.readouterr() == ("", "warning: careful\n")


def test_peers_option_takes_several_addresses_in_every_way() -> None:
    spread = ["train", "--peers", A, "--peers", B, "--out", "x"]
    assert spread_peers(["train", "--peers", A, B, "--out", "x"]) == spread
    assert spread_peers(["train", f"--peers={A}", B, "--out", "x"]) == spread
    assert spread_peers(spread) == spread


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("opendiloco ")


def test_module_and_script_end_with_the_exit_code_and_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "opendiloco", "train", "--set", "x"], capture_output=True, text=True)
    assert done.returncode == 64
    assert done.stderr == "opendiloco: --set x: write section.key=value, for example --set inner.steps=100\n"
