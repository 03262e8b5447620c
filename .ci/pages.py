"""What the site has from outside of docs/, under repo/: pages, and files that are linked to; links there and back.

A link in docs/ is written as it works in the repository. Whatever it names is put into the site, so that the site needs
no other host; what it names and is not there is a warning, and so an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = "docs"
INSIDE = "repo"
"""Folder of the site that holds what lies elsewhere in the repository."""
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("peers/**/README.md")))
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
OTHER_HOST = re.compile(r"[a-z][a-z0-9+.-]*:")

log = logging.getLogger("mkdocs.hooks.pages")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere, and the files that any page links to."""
    for page in PAGES:
        files.append(File.generated(config, f"{INSIDE}/{page}", abs_src_path=str(ROOT / page)))
    for file in [*files.documentation_pages()]:
        place = _place(file.src_uri)
        text = (ROOT / place).read_text(encoding="utf-8")
        for target in (_target(place, found[2]) for found in LINK.finditer(text) if not OTHER_HOST.match(found[2])):
            uri = _uri(target)
            if files.get_file_from_path(uri) is None and (ROOT / target).is_file():
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Have links lead to where their targets are in the site."""
    place = _place(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        before, named, anchor, after = link.groups()
        if OTHER_HOST.match(named):
            return link[0]
        target = _target(place, named)
        target = f"{target}/README.md" if (ROOT / target).is_dir() else target
        if not (ROOT / target).is_file():
            log.warning("%s links to %s, which is not there", place, named)
        there = posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{before}{there}{anchor or ''}{after}"

    return LINK.sub(moved, markdown)


def _place(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return uri.removeprefix(f"{INSIDE}/") if uri.startswith(f"{INSIDE}/") else f"{DOCS}/{uri}"


def _uri(place: str) -> str:
    """Where a file of the repository lies in the site."""
    return place.removeprefix(f"{DOCS}/") if place.startswith(f"{DOCS}/") else f"{INSIDE}/{place}"


def _target(place: str, named: str) -> str:
    """What a link in the file at `place` names, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), named))
