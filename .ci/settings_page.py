"""Writes docs/settings.md from the settings themselves; with --check, says whether the page is what they say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from pydantic.fields import FieldInfo

from opendiloco.config import Contract, PeerConfig
from opendiloco.section import Section, Unit, allowed, shown

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """\
<!-- .ci/settings_page.py writes this page from opendiloco/config.py: change that file, not these lines -->
# Settings

Every setting, as `opendiloco settings` lists them. A later source wins over an earlier one: defaults, then a TOML file
(`--run RUN.toml`, `--peer PEER.toml`), then `--set section.key=value`, then an option of its own such as `--peers`. The
value of `--set` is TOML, or plain text. A worker writes what came of it to `run.toml` and `peer.toml` in its folder.

Settings of the [run contract](#run-contract) are equal on all peers of a run: one worker brings them, the others take
them from the swarm. [A peer's own settings](#a-peers-own-settings) may differ from peer to peer.
"""
GROUPS = (
    ("Run contract", Contract, "Equal on all peers of a run; `--run RUN.toml` or `--set`."),
    ("A peer's own settings", PeerConfig, "Of one peer; `--peer PEER.toml` or `--set`."),
)


def page() -> str:
    """The text of the page."""
    lines = [HEAD]
    for title, config, about in GROUPS:
        lines += [f"## {title}", "", about, ""]
        for name, info in config.model_fields.items():
            section = info.annotation
            assert isinstance(section, type)
            assert issubclass(section, Section)
            lines += [f"### {name}", "", "| setting | default | unit | allowed | meaning |", "|---|---|---|---|---|"]
            lines += [_row(f"{name}.{key}", setting) for key, setting in section.model_fields.items()]
            lines.append("")
    return "\n".join(lines)


def _row(name: str, info: FieldInfo) -> str:
    units = list(dict.fromkeys(_units(info.annotation, info.metadata)))
    description = " ".join((info.description or "").split())
    cells = (f"`{name}`", f"`{shown(info.default)}`", ", ".join(units), allowed(info), description)
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _units(annotation: Any, metadata: Any) -> Iterator[str]:
    """What the numbers of a setting count."""
    for item in metadata:
        if isinstance(item, Unit):
            yield item.name
        elif isinstance(item, FieldInfo):
            yield from _units(None, item.metadata)
    if get_origin(annotation) is Annotated:
        yield from _units(get_args(annotation)[0], get_args(annotation)[1:])
    elif get_origin(annotation) is not None:
        for argument in get_args(annotation):
            yield from _units(argument, ())


def _escaped(text: str) -> str:
    """Text of a cell: nothing in it is Markdown or HTML."""
    if text.startswith("`"):
        return text.replace("|", "\\|")
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is another")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/settings.md is not what opendiloco/config.py says: run .ci/settings_page.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
