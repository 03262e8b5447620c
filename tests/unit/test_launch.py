"""launch.sh with stand-ins for Python: what it sets up, when, and what it starts. Nothing is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Makes an environment that holds a copy of itself; every call is a line of the file named in $CALLS.
STAND_IN = """#!/bin/bash
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
    '-m venv '*) mkdir -p "${!#}/bin" && cp -- "$0" "${!#}/bin/python" ;;
    '-m pip install '*) [[ -z ${FAIL_INSTALL:-} ]] ;;
esac
"""


class Checkout:
    """A copy of launch.sh in a folder with a space in its name, and a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"
        (self.root / "benchmarks").mkdir(parents=True)
        shutil.copy(ROOT / "launch.sh", self.root)
        (self.root / "pyproject.toml").write_text("[project]\n")
        (self.root / "benchmarks" / "bench_codec.py").touch()
        self.python = folder / "python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def launch(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """Exit code, stderr and the calls of Python except version checks; no stdin, another folder."""
        calls = self.elsewhere / "calls"
        calls.write_text("")
        done = subprocess.run(
            ["bash", str(self.root / "launch.sh"), *arguments],
            cwd=self.elsewhere,
            env={"PATH": "/usr/bin:/bin", "PYTHON": str(self.python), "CALLS": str(calls), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        lines = calls.read_text().splitlines()
        return done.returncode, done.stderr, [line for line in lines if line.startswith(("-m ", "-P ", "/"))]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_first_call_installs_and_later_ones_only_when_pyproject_changed(checkout: Checkout) -> None:
    def installs() -> int:
        code, _, calls = checkout.launch("version")
        assert code == 0
        assert calls[-1] == "-P -m opendiloco version"
        return sum(call.startswith("-m pip install") for call in calls)

    assert installs() == 1
    assert installs() == 0
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert installs() == 1
    assert installs() == 0


def test_set_up_says_one_line_and_keeps_stdout_for_the_command(checkout: Checkout) -> None:
    _, errors, calls = checkout.launch()
    assert errors.count("\n") == 1
    assert "installing opendiloco into" in errors
    assert calls[0] == f"-m venv --clear -- {checkout.root}/.venv"
    assert calls[1].endswith(f"--editable {checkout.root}[dev]")


def test_failed_installation_is_tried_again(checkout: Checkout) -> None:
    code, errors, calls = checkout.launch("version", FAIL_INSTALL="1")
    assert code == 1
    assert "the installation failed" in errors
    assert "-P -m opendiloco version" not in calls
    code, _, calls = checkout.launch("version")
    assert code == 0
    assert any(call.startswith("-m pip install") for call in calls)


def set_ups() -> list[tuple[str, str]]:
    """(recipe, arguments) of each launch.sh that a recipe calls."""
    files = [path for path in sorted((ROOT / "peers").rglob("*")) if path.is_file()]
    called = re.compile(r"launch\.sh((?: +[\w-]+)*)")
    return [(path.parent.name, found[1].strip()) for path in files for found in called.finditer(path.read_text())]


@pytest.mark.parametrize(("recipe", "arguments"), set_ups())
def test_what_a_recipe_calls_launch_for_sets_up(checkout: Checkout, recipe: str, arguments: str) -> None:
    code, _, calls = checkout.launch(*arguments.split())
    assert code == 0
    assert any(call.startswith("-m pip install") for call in calls), f"{recipe}: ./launch.sh {arguments}"


def test_recipes_that_start_what_is_in_the_environment_make_it() -> None:
    assert {recipe for recipe, _ in set_ups()} == {"local", "systemd", "slurm", "skypilot"}


def test_each_form_starts_what_the_table_says(checkout: Checkout) -> None:
    checkout.launch("version")
    for arguments, expected in {
        (): ["-P -m opendiloco.demo "],
        ("--rounds", "2"): ["-P -m opendiloco.demo --rounds 2"],
        ("train", "--set", "a.b=c d"): ["-P -m opendiloco train --set a.b=c d"],
        ("test",): [
            "-m ruff format --check .",
            "-m ruff check .",
            "-m mypy",
            "-m pytest -n 2 tests/unit",
            "-m pytest -n 2 --dist loadfile --no-loadscope-reorder -m not timing tests/faults tests/swarm",
            "-m pytest -n 2 --dist loadfile --no-loadscope-reorder -m timing tests/faults tests/swarm",
        ],
        ("test", "-k", "x"): ["-m pytest -k x"],
        ("bench", "codec", "--fast"): [f"{checkout.root}/benchmarks/bench_codec.py --fast"],
    }.items():
        code, errors, calls = checkout.launch(*arguments)
        assert (code, errors) == (0, "")
        assert [call.strip() for call in calls] == [call.strip() for call in expected]


@pytest.mark.parametrize("arguments", [("bench",), ("bench", "unknown")])
def test_missing_or_unknown_benchmark_lists_the_names_and_ends_with_64(
    checkout: Checkout, arguments: tuple[str, ...]
) -> None:
    code, errors, calls = checkout.launch(*arguments)
    assert (code, calls) == (64, [])
    assert errors.endswith("NAME is one of: codec\n")


def test_no_suitable_python_is_one_line(checkout: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "cmp", "flock"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    code, errors, _ = checkout.launch("version", PATH=str(tools), PYTHON="/none/python")
    assert code == 1
    assert errors.count("\n") == 1
    assert "no Python 3.11, 3.12 or 3.13" in errors


def test_help_needs_no_set_up(checkout: Checkout) -> None:
    code, errors, calls = checkout.launch("--help")
    assert (code, errors, calls) == (0, "", [])
