"""The cures that error lines name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import opendiloco
from opendiloco.errors import pip_install


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of which this interpreter is."""
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "pip").touch()
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    return folder


def test_what_is_missing_is_installed_where_this_program_runs(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pip_install("peft") == f"{environment}/bin/pip install peft"
    monkeypatch.chdir(environment.parent)
    assert pip_install("lm-eval[hf]") == ".venv/bin/pip install 'lm-eval[hf]'"
    (environment / "bin" / "pip").unlink()
    assert pip_install("peft") == ".venv/bin/python -m pip install peft"


def test_no_line_of_the_package_leaves_open_which_pip_it_means() -> None:
    folder = Path(opendiloco.__file__).parent
    assert not [path.name for path in folder.glob("*.py") if "pip install" in path.read_text()]
