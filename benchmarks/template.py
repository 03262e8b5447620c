"""Text with placeholders, filled and wrapped: `{kill.median_s:.1f}` is a value, formatted as Python formats it.

Before the format a conversion may stand: `{kill.values!M:g}` is in millions, `{worker.end_of_round_s!m:.0f}` in
thousandths, `{kill.workers!w}` a word up to twelve, and `{kill.has_same_bits!t}` leaves nothing in the text: it must be
true for the sentence around it to be.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

WIDTH = 120
WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905 - in order
_PLACEHOLDER = re.compile(r"\{([\w.-]+)(?:!([a-zA-Z]))?(?::([^{}]*))?\}")
_CODE = re.compile(r"`[^`]*`")
_TYPED = re.compile(r"(?<![\w.])\d[\d.,]*")


class TemplateError(Exception):
    """A placeholder that cannot be filled; the message says why."""


def fill(text: str, value_of: Callable[[str], Any]) -> tuple[str, list[tuple[int, str]]]:
    """The text with all placeholders filled and paragraphs wrapped, and the problems: their line and what is wrong.

    Args:
        value_of: the value of a path, or TemplateError.
    """
    problems: list[tuple[int, str]] = []

    def line_of(position: int) -> int:
        return text.count("\n", 0, position) + 1

    def replace(match: re.Match[str]) -> str:
        path, conversion, spec = match.groups()
        try:
            return _format(value_of(path), conversion or "", spec or "")
        except TemplateError as error:
            problems.append((line_of(match.start()), f"{match[0]}: {error}"))
            return match[0]

    filled = _PLACEHOLDER.sub(replace, text)
    # What is left: of the same length and lines as the template.
    bare = _CODE.sub(_blank, _PLACEHOLDER.sub(_blank, text))
    problems += [
        (line_of(match.start()), f"{match[0]} is part of no placeholder") for match in re.finditer("[{}]", bare)
    ]
    problems += [
        (line_of(match.start()), f"{match[0].rstrip('.,')} is typed: figures come from placeholders")
        for match in _TYPED.finditer(bare)
    ]
    return "\n\n".join(map(_wrap, filled.strip("\n").split("\n\n"))) + "\n", sorted(problems)


def _format(value: Any, conversion: str, spec: str) -> str:
    try:
        match conversion:
            case "t":
                if value is not True:
                    raise TemplateError("this does not hold in the results: change the sentence")
                return ""
            case "w":
                return WORDS[int(value)] if value in range(len(WORDS)) else format(value, spec or "g")
            case "m":
                value *= 1e3
            case "M":
                value /= 1e6
            case "":
                pass
            case _:
                raise TemplateError(f"there is no conversion {conversion}: use !m, !M, !w or !t")
        return format(value, spec).replace("%", " %")
    except (TypeError, ValueError) as error:
        raise TemplateError(f"{value!r} cannot be written like that ({error})") from None


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _wrap(block: str) -> str:
    """A paragraph in lines of WIDTH, never broken within code; headings, tables and images stay what they are."""
    if block.lstrip().startswith(("#", "|", "!", "<")):
        return block
    one_line = _CODE.sub(lambda match: match[0].replace(" ", "\0"), " ".join(block.split())).replace(" %", "\0%")
    lines = textwrap.wrap(one_line, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def differences(found: str, wanted: str) -> Iterator[tuple[int, str]]:
    """Line in `found` and what it is there and should be, word by word."""
    words = [(number, word) for number, line in enumerate(found.splitlines(), 1) for word in line.split()]
    theirs, ours = [word for _, word in words], wanted.split()
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for kind, start, end, first, last in matcher.get_opcodes():
        if kind != "equal":
            line = words[min(start, len(words) - 1)][0] if words else 1
            yield line, f'says "{" ".join(theirs[start:end])}" where the results say "{" ".join(ours[first:last])}"'
    if theirs == ours and found != wanted:
        yield 1, "has the right words in other lines"
