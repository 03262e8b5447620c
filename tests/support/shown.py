"""Commands that the documentation shows, and whether the product would understand them. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import typer
from typer.core import TyperGroup

from opendiloco import demo
from opendiloco.commands import app
from opendiloco.options import spread_peers
from opendiloco.settings import Flag, load_settings

ROOT = Path(__file__).parents[2]
NEEDS = re.compile(r"<!-- needs: \S.* -->")
SHELL = ("bash", "sh", "shell", "console")
OWN = ("./launch.sh", "opendiloco", ".venv/bin/")
COMMANDS_OF_LAUNCHER = {"test", "bench"}
TORCHRUN = ("-m", "--", "opendiloco")
ASSIGNED = re.compile(r"\w+=")
PART_OF_CLONE = re.compile(r"(?:/opt/opendiloco/|\$\w+/)?((?:peers|examples|benchmarks)/\S+)")


@dataclass(frozen=True)
class Shown:
    """One command in a block of a page."""

    place: str
    """PAGE:LINE of its block."""
    words: tuple[str, ...]
    needs: bool
    """Whether the block says that it needs other hardware or another network."""

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def blocks(page: Path, languages: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Blocks of code in these languages: their line, the line before them, their text."""
    before, start, lines = "", 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if start and line.strip() == "```":
            if lines[0].strip().removeprefix("```") in languages:
                yield start, before, "\n".join(lines[1:])
            start, before = 0, ""
        elif start:
            lines.append(line)
        elif line.strip().startswith("```"):
            start, lines = number, [line]
        else:
            before = line.strip()


def commands(page: Path) -> Iterator[Shown]:
    """All commands in a page's shell blocks, one for each of several on a line."""
    for number, before, text in blocks(page, SHELL):
        whole = re.sub(r"\$\([^)]*\)", "ADDRESS", text.replace("\\\n", " "))
        for line in whole.splitlines():
            words = shlex.split(line, comments=True)
            while words and ASSIGNED.match(words[0]):
                del words[0]
            if words:
                place = f"{page.relative_to(ROOT)}:{number}"
                yield Shown(place, tuple(words), needs=NEEDS.fullmatch(before) is not None)


def check(shown: Shown) -> None:
    """Raise where the product would not understand a command of its own; files that it names need not be there."""
    program, *arguments = shown.words
    assert not missing_files(shown.words), f"{shown}: {missing_files(shown.words)} are not there"
    match program.rpartition("/")[2]:
        case "launch.sh" if not arguments or arguments[0].startswith("-"):
            demo._settings(demo._parse(arguments))
        case "launch.sh" if arguments[0] == "bench":
            _check_script(Path("benchmarks", f"bench_{arguments[1]}.py"), arguments[2:])
        case "launch.sh" if arguments[0] == "test":
            assert all((ROOT / name).exists() for name in arguments[1:] if name.startswith("tests/")), shown
        case "launch.sh" | "opendiloco":
            _check_command(arguments)
        case "torchrun":
            at = arguments.index("-m")
            assert tuple(arguments[at : at + 3]) == TORCHRUN, shown
            _check_command(arguments[at + 3 :])
        case "python" if arguments[0].endswith(".py"):
            _check_script(Path(arguments[0]), arguments[1:])
        case _:
            raise AssertionError(f"{shown}: nobody knows whether this works")


def inside(words: Sequence[str]) -> list[str] | None:
    """The `opendiloco COMMAND ...` that another program is told to start, by its name or that of an image."""
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for at, (word, following) in enumerate(pairwise(words)):
        if at and word.rpartition("/")[2] == "opendiloco" and following in names:
            return ["opendiloco", *words[at + 1 :]]
    return None


def missing_files(words: Sequence[str]) -> list[str]:
    """Files of the clone that a command names and that are not there."""
    named = (found[1] for word in words if (found := PART_OF_CLONE.fullmatch(word.partition("=")[2] or word)))
    return [name for name in named if not (ROOT / name).exists()]


def _check_command(arguments: Sequence[str]) -> None:
    """The real parser, then the settings that are given; the function behind the command is not called."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    name, *rest = spread_peers(arguments)
    context = typer.Context(group, info_name="opendiloco")
    command = group.get_command(context, name)
    assert command is not None, f"there is no command {name}"
    with command.make_context(name, rest, parent=context) as inner:
        given = inner.params
    flags = [Flag("--run-id", "run.id", given["run_id"])] if given.get("run_id") else []
    peer = given.get("peer")
    peer = Path(str(peer).removeprefix("/opt/opendiloco/")) if peer is not None else None
    profile = ROOT / peer if peer is not None and (ROOT / peer).is_file() else None
    load_settings(None, profile, given.get("set_") or (), flags=flags)


def _check_script(script: Path, arguments: Sequence[str]) -> None:
    """That it is there, and knows the options; scripts cost seconds to import."""
    source = (ROOT / script).read_text()
    if script.parts[0] == "benchmarks":
        source += (ROOT / "benchmarks" / "common.py").read_text()
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in source, f"{script} has no option {word}"
