"""Errors a user can act on. Each is one line that names the setting, the values and the cure.

Exit codes follow sysexits.h: 64 means the settings are wrong, so restarting with the same ones is useless;
75 means the swarm could not be reached or held, so restarting is the cure.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path


class OpendilocoError(Exception):
    """Base of every error that ends a command with one line instead of a traceback."""

    exit_code = 1


class SettingsError(OpendilocoError):
    """The settings (or the files they name) are wrong: do not restart with the same ones."""

    exit_code = 64


class SwarmError(OpendilocoError):
    """The swarm could not be reached or stayed away: restart the peer."""

    exit_code = 75


def one_line(text: str) -> str:
    """Foreign words, fit for a log and a terminal: no line breaks, nothing that steers a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in re.sub(r"\s+", " ", text))


def pip_install(*arguments: str) -> str:
    """The command that installs something for the interpreter that runs this, which bare `pip` need not do."""
    pip = Path(sys.prefix) / "bin" / "pip"
    program, options = (pip, []) if pip.is_file() else (Path(sys.executable), ["-m", "pip"])
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return shlex.join([str(program), *options, "install", *arguments])
