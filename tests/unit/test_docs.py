"""The documentation says what is so: it builds without a warning, and has all settings, messages, modules, commands."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.messages import Message, Source, of_launcher
from support.shown import ROOT, Shown, blocks, check, commands, inside, missing_files

from opendiloco.errors import SettingsError
from opendiloco.settings import load_settings

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
RECIPES = [ROOT / "peers" / "README.md", *sorted((ROOT / "peers").glob("*/README.md"))]
FITS_ANYTHING = {
    "SETTING is VALUE: must be WHAT IS ALLOWED",
    "SECTION is VALUE: WHAT IS WRONG",
    "TASK has failed",
    "--resume latest: FOLDER is damaged (KIND: REASON): name another checkpoint, or none; trying NAME",
}
"""Entries of messages that have hardly a word of their own: nothing else would show that they are out of date."""
HANDED_ON = {
    "addresses.py",  # what the system says
    "channel.py",  # an error of the network process, as Python writes it
    "compute.py",  # the line that a caller of out_of_memory gives
    "demo.py",  # a worker's name, its end, its last words
    "donor.py",  # what `refused:` quotes
    "folder.py",  # OSError of the log
    "loop.py",  # an error that is an entry itself
    "metrics.py",
    "onlooker.py",  # health.py's
    "roundlog.py",
    "section.py",  # pydantic's words for a section
    "settings.py",  # checks of config.py
    "sinks.py",  # a sink's own words
    "worker.py",
}
"""Modules with messages that are somebody else's text."""
RUN_BY_TESTS = {
    (".venv/bin/python", "examples/own_loop.py"): ("swarm/test_examples.py", "test_loop_alone_does_its_rounds"),
    (".venv/bin/python", ".ci/settings_page.py"): ("unit/test_docs.py", "test_the_page_of_settings_is_what_they_are"),
    (".venv/bin/python", "-m", "mkdocs"): ("unit/test_docs.py", "test_the_site_builds_without_a_warning"),
    ("./launch.sh",): ("swarm/test_demo.py", "test_demo_goes_on_without_a_worker_that_is_killed"),
    ("./launch.sh", "test"): ("unit/test_launch.py", "test_each_form_starts_what_the_table_says"),
    ("./launch.sh", "bench"): ("unit/test_launch.py", "test_each_form_starts_what_the_table_says"),
}
"""How commands begin that are no command of `opendiloco` -> the test that runs such a one."""


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def entries(page: str) -> list[str]:
    """Messages that a page explains: lines that are nothing but code."""
    return [
        found[2].strip() for found in re.finditer(r"^(`{1,2})([^`].*?)\1$", (DOCS / page).read_text(), re.MULTILINE)
    ]


def check_entries(page: str, messages: Iterable[Message]) -> None:
    """Every message has an entry, and every entry is of a message."""
    said, known = [message for message in messages if not message.is_handed_on], entries(page)
    missing = [str(message) for message in said if not any(map(message.pattern.fullmatch, known))]
    assert not missing, f"docs/{page} has no entry for {missing}"
    telling = [message for message in said if not message.is_vague]
    old = [entry for entry in known if not any(message.pattern.fullmatch(entry) for message in telling)]
    assert set(old) <= FITS_ANYTHING, f"docs/{page} explains what nobody says: {sorted(set(old) - FITS_ANYTHING)}"


# --- the site ------------------------------------------------------------------------------------------


class Loads(HTMLParser):
    """Addresses that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = "href" if tag == "link" else "src" if tag in ("script", "img", "iframe", "source") else ""
        if given.get(name):
            self.found.append(str(given[name]))


def build(out: Path, config: Path = ROOT / ".ci" / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    environment = {"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    built = build(tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.found
        assert not [address for address in loads.found if "//" in address], page


def test_pictures_have_words_for_those_who_do_not_see_them() -> None:
    pictures = sorted((DOCS / "pictures").glob("*.svg"))
    shown = "".join(page.read_text() for page in PAGES)
    for picture in pictures:
        tree, name = ElementTree.parse(picture), "{http://www.w3.org/2000/svg}"
        words = [tree.findtext(f"{name}{kind}", "") for kind in ("title", "desc")]
        assert all(len(text) > 20 for text in words), picture.name
        assert "prefers-color-scheme: dark" in picture.read_text()
        assert re.search(rf"!\[[^\]]{{20,}}\]\(pictures/{picture.name}\)", shown), f"{picture.name} is not shown"
    assert pictures


# --- settings, messages, modules -----------------------------------------------------------------------


def test_the_page_of_settings_is_what_they_are() -> None:
    checked = subprocess.run([sys.executable, ROOT / ".ci" / "settings_page.py", "--check"], check=False)
    assert checked.returncode == 0
    page = (DOCS / "settings.md").read_text()
    listed = re.findall(r"^\| `(\w+\.\w+)` \|", page, re.MULTILINE)
    assert "run.id" in listed
    assert "log.project" in listed
    assert not [name for name, times in Counter(listed).items() if times > 1]


def test_every_message_of_the_product_has_an_entry(source: Source) -> None:
    check_entries("failures.md", [*source.errors(), *source.reasons(), *source.warnings(), *of_launcher()])


def test_every_finding_and_every_trouble_has_an_entry(source: Source) -> None:
    check_entries("monitor.md", [*source.calls_of("Finding", 1, {"bad", "note"}), *source.calls_of("Trouble", 1)])


def test_messages_are_found_where_the_source_makes_them(source: Source) -> None:
    errors = [*source.errors()]
    texts = [str(message) for message in errors]
    assert len(errors) > 150
    for words in (
        "rounds.deadline is ... and outer.weighting is",  # a check of settings
        "run.id ... is taken: peer ...",  # returned by a method
        "out of memory with one sequence at a time (...)",  # in a lambda
        "0 peers of ...: ...",
    ):
        assert any(words in text for text in texts), words
    foreign = {message.place.split("/")[-1].split(":")[0] for message in errors if message.is_handed_on}
    assert foreign <= HANDED_ON


def test_every_module_is_on_the_map_once() -> None:
    package = ROOT / "opendiloco"
    modules = sorted(str(path.relative_to(package)) for path in package.rglob("*.py"))
    assert sorted(re.findall(r"^\| `([\w/]+\.py)` \| ", (DOCS / "map.md").read_text(), re.MULTILINE)) == modules


# --- commands ------------------------------------------------------------------------------------------


def all_commands() -> list[Shown]:
    return [shown for page in (*PAGES, *RECIPES) for shown in commands(page)]


def ways(shown: Shown) -> tuple[str, str] | None:
    """The test that runs such a command, by the longest beginning in the table."""
    fitting = [start for start in RUN_BY_TESTS if shown.words[: len(start)] == start]
    return RUN_BY_TESTS[max(fitting, key=len)] if fitting else None


@pytest.mark.parametrize("shown", all_commands(), ids=lambda shown: f"{shown.place} {' '.join(shown.words[:2])}")
def test_a_command_that_is_shown_is_understood_or_run_by_a_test_or_needs_something(shown: Shown) -> None:
    test = ways(shown)
    words = shown.words if not shown.words[0].startswith("--") else ("opendiloco", "train", *shown.words)
    assert not missing_files(words), shown
    is_own = words[0] in ("./launch.sh", "opendiloco", ".venv/bin/torchrun")
    if (started := inside(words)) is not None and not is_own:
        check(Shown(shown.place, tuple(started), shown.needs))
    elif is_own or (len(words) > 1 and words[1].endswith(".py")):
        check(Shown(shown.place, words, shown.needs))
    elif test is None:
        assert shown.needs, f"{shown} is neither the product's own, nor run by a test, nor marked with <!-- needs: -->"
    if test is not None:
        file, name = test
        assert f"def {name}" in (ROOT / "tests" / file).read_text(), f"{file} has no {name}"


@pytest.mark.parametrize(
    "words", ["peers/local/keep.py opendiloco train --no-such-option", "docker run -p 1:1 opendiloco train --peer x"]
)
def test_a_command_that_another_program_starts_is_looked_at(words: str) -> None:
    started = inside(words.split())
    assert started is not None
    assert started[:2] == ["opendiloco", "train"]


def test_a_file_that_is_not_there_is_noticed() -> None:
    assert missing_files(["sbatch", "peers/slurm/worker.sbatch", "peers/slurm/x.sbatch"]) == ["peers/slurm/x.sbatch"]
    assert missing_files(["sky", "PROFILE=peers/profiles/x.toml"]) == ["peers/profiles/x.toml"]


@pytest.mark.parametrize(
    "words",
    [
        "./launch.sh train --no-such-option",
        "./launch.sh trane --out runs/a",
        "./launch.sh train --set inner.stepz=5",
        "./launch.sh train --set inner.steps=many",
        "./launch.sh train --peer peers/profiles/nobody.toml",
        "./launch.sh bench nothing",
        "./launch.sh bench wan --no-such-option",
        "./launch.sh --no-such-option",
        ".venv/bin/torchrun --nproc_per_node=8 -m -- opendiloco train --no-such-option",
        ".venv/bin/pip install something",
    ],
)
def test_a_command_that_would_not_work_is_noticed(words: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(Shown("here:1", tuple(words.split()), needs=False))


def test_files_of_settings_that_are_shown_are_settings(tmp_path: Path) -> None:
    contracts = [text for page in PAGES for _, _, text in blocks(page, ("toml",))]
    assert contracts
    for text in contracts:
        file = tmp_path / "shown.toml"
        file.write_text(text)
        load_settings(file)


def test_a_key_that_is_none_is_noticed_in_them(tmp_path: Path) -> None:
    file = tmp_path / "shown.toml"
    file.write_text("[inner]\nstepz = 5\n")
    with pytest.raises(SettingsError, match="unknown setting"):
        load_settings(file)


def test_every_command_of_the_product_is_shown_somewhere() -> None:
    import typer

    from opendiloco.commands import app

    named = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = {shown.words[1] for shown in all_commands() if shown.words[0] == "./launch.sh" and len(shown.words) > 1}
    assert named - shown <= {"settings", "version"}
