"""Everything the product says when something is wrong, read from its source: texts with gaps where values go."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "opendiloco"
GAP = None
"""Stands for a value that is known only when the message is made."""
MAX_DEPTH = 4
LEAST_TEXT, VAGUE_TEXT = 6, 16
"""Letters that a message must have of its own: with fewer it hands another one on, or fits too many texts."""

Parts = tuple[str | None, ...]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Message:
    """One message, with the place that makes it."""

    place: str
    """FILE:LINE."""
    parts: Parts

    @property
    def pattern(self) -> re.Pattern[str]:
        """What every text that this message can be matches as a whole."""
        return re.compile("".join(".*" if part is GAP else re.escape(part) for part in self.parts), re.DOTALL)

    @property
    def is_handed_on(self) -> bool:
        """Whether it has no words of its own, and is somebody else's text."""
        return sum(len(part) for part in self.parts if part is not GAP) < LEAST_TEXT

    @property
    def is_vague(self) -> bool:
        """Whether its beginning is open and so little of it is fixed that texts of other messages fit it, too."""
        text = sum(len(part) for part in self.parts if part is not GAP)
        return self.parts[0] is GAP and text < VAGUE_TEXT

    def __str__(self) -> str:
        return f"{self.place}: {''.join('...' if part is GAP else part for part in self.parts)}"


class Source:
    """All modules of the package."""

    def __init__(self, folder: Path = PACKAGE) -> None:
        self._trees = {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
        self._folder = folder
        self._functions: dict[str, list[Function]] = {}
        self._local: dict[tuple[Path, str], list[Function]] = {}
        self._around: dict[ast.AST, Function] = {}
        for path, tree in self._trees.items():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    self._functions.setdefault(node.name, []).append(node)
                    self._local.setdefault((path, node.name), []).append(node)
                    self._around |= dict.fromkeys(ast.walk(node), node)  # the innermost comes last

    def errors(self) -> Iterator[Message]:
        """First arguments of `OpendilocoError` and all below it, of checks of settings, and of `out_of_memory`."""
        names = self._below({"OpendilocoError"})
        for path, call, name in self._calls():
            is_check = path.name == "config.py" and name == "ValueError"
            if (name in names or is_check) and call.args:
                yield from self._messages(path, call, call.args[0])
            if name == "out_of_memory" and isinstance(call.args[0], ast.Lambda):
                yield from self._messages(path, call, call.args[0].body)

    def reasons(self) -> Iterator[Message]:
        """Why an attempt came to nothing, which other messages quote."""
        names = self._below({"WireError", "LogError", "_Failed"})
        for path, call, name in self._calls():
            if name in names and call.args:
                yield from self._messages(path, call, call.args[0])

    def warnings(self) -> Iterator[Message]:
        """Lines of the log at level WARNING and above, and those of helper processes on standard error."""
        for path, call, name in self._calls():
            if name in ("warning", "error", "_warn") and isinstance(call.func, ast.Attribute) and call.args:
                for message in self._messages(path, call, call.args[0]):
                    yield Message(message.place, tuple(_without_format(message.parts)))
            if path.name == "guard.py" and name == "print":
                yield from self._messages(path, call, call.args[0])
        for name in ("_end_of_daemon", "_jump_of_clock"):  # what `end_of_use` gives, which is logged
            for parts in self._returned(self._folder / "health.py", name, MAX_DEPTH):
                yield Message(f"health.py, {name}", _joined(parts))

    def calls_of(self, name: str, argument: int, first: Collection[str] | None = None) -> Iterator[Message]:
        """The text that is argument number `argument` of every call of `name`, whose first one is in `first`."""
        for path, call, called in self._calls():
            if called != name or len(call.args) <= argument:
                continue
            kind = call.args[0]
            if first is None or (isinstance(kind, ast.Constant) and kind.value in first):
                yield from self._messages(path, call, call.args[argument])

    def _calls(self) -> Iterator[tuple[Path, ast.Call, str]]:
        for path, tree in self._trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    yield path, node, _name(node.func)

    def _below(self, names: set[str]) -> set[str]:
        """These classes and all that inherit from them."""
        classes = [node for tree in self._trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        while more := {node.name for node in classes if {_name(base) for base in node.bases} & names} - names:
            names = names | more
        return names

    def _messages(self, path: Path, call: ast.Call, text: ast.expr) -> Iterator[Message]:
        place = f"{path.relative_to(self._folder.parent)}:{call.lineno}"
        for parts in self._resolve(path, self._around.get(call), text, MAX_DEPTH):
            yield Message(place, _joined(parts))

    def _resolve(self, path: Path, function: Function | None, text: ast.expr, depth: int) -> list[Parts]:
        """All texts that an expression can be, as far as the source tells."""
        match text:
            case ast.Constant(value=str(value)):
                return [(value,)]
            case ast.JoinedStr(values=values):
                pieces = [part.value if isinstance(part, ast.Constant) else GAP for part in values]
                return [tuple(str(piece) if piece is not GAP else GAP for piece in pieces)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                both = product(*(self._resolve(path, function, side, depth) for side in (left, right)))
                return [(*before, *after) for before, after in both]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._resolve(path, function, body, depth), *self._resolve(path, function, orelse, depth)]
            case ast.Name(id=name) if depth and function is not None:
                values = list(_assigned(function, name))
                found = [parts for value in values for parts in self._resolve(path, function, value, depth - 1)]
                return found or [(GAP,)]
            case ast.Call(func=called) if depth:
                return self._returned(path, _name(called), depth - 1) or [(GAP,)]
        return [(GAP,)]

    def _returned(self, path: Path, name: str, depth: int) -> list[Parts]:
        """What a function of the package returns, if only one of that name comes into question."""
        found = self._local.get((path, name)) or self._functions.get(name, [])
        if len(found) != 1:
            return []
        returns = [node.value for node in ast.walk(found[0]) if isinstance(node, ast.Return) and node.value]
        module = next(where for where, tree in self._trees.items() if found[0] in ast.walk(tree))
        return [parts for value in returns for parts in self._resolve(module, found[0], value, depth)]


def of_launcher(script: Path = ROOT / "launch.sh") -> Iterator[Message]:
    """What `launch.sh` says when it fails."""
    for number, line in enumerate(script.read_text().splitlines(), start=1):
        if found := re.search(r'fail \d+ "(.*)"', line):
            pieces = re.split(r"\$\{[^}]*\}|\$\w+", found[1])
            parts = [part for piece in pieces for part in (piece, GAP)][:-1]
            yield Message(f"{script.name}:{number}", _joined(parts))


def _assigned(function: Function, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from (
                    value
                    for target, value in zip(targets, values, strict=False)
                    if isinstance(target, ast.Name) and target.id == name
                )


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _without_format(parts: Parts) -> Iterator[str | None]:
    """%s and its like are gaps."""
    for part in parts:
        if part is GAP:
            yield GAP
            continue
        pieces = re.split(r"%[-+0-9.]*[sdrgf]", part)
        for number, piece in enumerate(pieces):
            yield piece.replace("%%", "%")
            if number + 1 < len(pieces):
                yield GAP


def _joined(parts: Sequence[str | None]) -> Parts:
    """Without empty texts, and with what stands side by side as one."""
    joined: list[str | None] = []
    for part in parts:
        if part == "":
            continue
        if joined and part is not GAP and joined[-1] is not GAP:
            joined[-1] = f"{joined[-1]}{part}"
        elif not (joined and part is GAP and joined[-1] is GAP):
            joined.append(part)
    return tuple(joined)
