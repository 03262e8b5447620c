"""What do the results say? Writes the README's figures, docs/benchmarks.md and its plots from benchmarks/results.

The texts are templates beside this file, `readme.in.md` and `benchmarks.in.md`, whose figures are placeholders. With
--check nothing is written: the exit code says whether everything is as this command would write it.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from benchmarks.common import ROOT, run_script
from benchmarks.figures import value_of
from benchmarks.plots import PLOTS as PLAIN_PLOTS
from benchmarks.plots import digest_in, digest_of, draw
from benchmarks.quality_plots import QUALITY_PLOTS
from benchmarks.records import NoSourceError
from benchmarks.template import TemplateError, differences, fill

COMMAND = "./launch.sh bench report"
NOTE = f"<!-- {COMMAND} writes this from benchmarks/{{}}: change that file, not these lines -->\n"
END = f"<!-- end of what {COMMAND} writes -->\n"
SOURCE = "benchmarks/results/"
EXTRA_MISSING = 64
PLOTS = {**PLAIN_PLOTS, **QUALITY_PLOTS}
PLOT_CODE = ("plots.py", "quality_plots.py")


class Sources:
    """The results and scripts of a clone."""

    def __init__(self, root: Path) -> None:
        self._scripts = root / "benchmarks"
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.used: set[str] = set()
        """Benchmarks that a text has asked for."""
        for path in sorted((root / SOURCE).glob("*.jsonl")):
            self.results[path.stem] = list(self._records(path))

    def value_of(self, path: str) -> Any:
        """What stands for a placeholder.

        Raises:
            TemplateError: nothing does; the message names the benchmark to run.
        """
        name, _, field = path.partition(".")
        script = self._script(name)
        if script is None:
            raise TemplateError(f"there is no benchmark {name}: correct the name")
        self.used.add(name)
        if field == "question":
            return (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n")[0]
        if field == "command":
            return self._command(name)
        try:
            return value_of(self.results, path)
        except NoSourceError as error:
            source = error.benchmark
            raise TemplateError(f"{SOURCE}{source}.jsonl {error}: run {self._command(source)}") from None

    def _records(self, path: Path) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                yield dict(json.loads(line))
            except (TypeError, ValueError):
                where, cure = f"{SOURCE}{path.name} line {number}", f"run {self._command(path.stem)}"
                self.problems.append(f"{where} is no JSON object: {cure}")

    def _script(self, name: str) -> Path | None:
        found = (self._scripts / f"{prefix}{name}.py" for prefix in ("bench_", ""))
        return next((path for path in found if path.is_file()), None)

    def _command(self, name: str) -> str:
        if (self._scripts / f"bench_{name}.py").is_file():
            return f"./launch.sh bench {name}"
        return f".venv/bin/python benchmarks/{name}.py --out {SOURCE}{name}.jsonl"


@dataclass(frozen=True)
class Page:
    """A document, or the part of it that is written here."""

    path: str
    before: str
    written: str
    after: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return self.before + self.written + self.after

    def differences(self, root: Path) -> Iterator[str]:
        """How the file differs, a line each."""
        file = root / self.path
        found = file.read_text() if file.exists() else ""
        written = found[len(self.before) : len(found) - len(self.after)]
        first = self.before.count("\n")
        for line, difference in differences(written, self.written):
            yield f"{self.path} line {first + line} {difference}"


def compose(root: Path, sources: Sources) -> tuple[list[Page], list[str]]:
    """The pages as the results have them, and what keeps them from being so, a line each."""
    problems = list(sources.problems)

    def filled(name: str) -> str:
        text, wrong = fill((root / name).read_text(), sources.value_of)
        problems.extend(f"{name} line {line}: {problem}" for line, problem in wrong)
        return text

    pages = [Page("docs/benchmarks.md", "", NOTE.format("benchmarks.in.md") + filled("benchmarks/benchmarks.in.md"))]
    unused = sorted(set(sources.results) - sources.used)
    problems += [f"benchmarks/benchmarks.in.md has no section for {SOURCE}{name}.jsonl" for name in unused]
    block = filled("benchmarks/readme.in.md")
    before, begin, rest = (root / "README.md").read_text().partition(NOTE.format("readme.in.md"))
    inside, end, after = rest.partition(END)
    if end:
        pages.append(Page("README.md", before + begin, "\n" + block + "\n", end + after))
    else:
        problems.append(f"README.md has no block between {NOTE.format('readme.in.md').strip()} and {END.strip()}")
    outside = before + begin + "\n" * inside.count("\n") + end + after  # the same lines
    for line, text in enumerate(outside.splitlines(), 1):
        if SOURCE in text:
            problems.append(
                f"README.md line {line} cites {SOURCE} outside the block: move it to benchmarks/readme.in.md"
            )
    return pages, problems


def stale_plots(root: Path, sources: Sources) -> dict[str, str]:
    """Plots that are not drawn from these results by this code, and the digest of what they should be drawn from."""
    code = "".join((root / "benchmarks" / name).read_text() for name in PLOT_CODE)
    wanted = {name: digest_of(plot, sources.results, code) for name, plot in PLOTS.items()}
    return {name: digest for name, digest in wanted.items() if digest_in(plot_path(root, name)) != digest}


def plot_path(root: Path, name: str) -> Path:
    """Where a plot is."""
    return root / "docs" / "figures" / f"{name}.svg"


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Write or check; the exit code is 1 where figures lack a source or, with --check, documents differ."""
    parser = argparse.ArgumentParser(prog="launch.sh bench report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    options = parser.parse_args(argv)
    sources = Sources(root)
    pages, problems = compose(root, sources)
    stale = {} if problems else stale_plots(root, sources)
    if options.check and not problems:
        problems = [difference for page in pages for difference in page.differences(root)]
        problems += [f"docs/figures/{name}.svg is not drawn from these results as now: run {COMMAND}" for name in stale]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    if options.check:
        print(f"{', '.join(page.path for page in pages)} and {len(PLOTS)} plots are what the results say")
        return 0
    try:
        plots = {name: draw(PLOTS[name], sources.results, digest) for name, digest in stale.items()}
    except ImportError:
        print(
            f"{COMMAND} draws with matplotlib, which is not there: .venv/bin/pip install -e '.[bench]'", file=sys.stderr
        )
        return EXTRA_MISSING
    for name, image in plots.items():
        _write(root, plot_path(root, name), image)
    for page in pages:
        _write(root, root / page.path, page.text.encode())
    return 0


def _write(root: Path, path: Path, content: bytes) -> None:
    """Replace a file, if it differs, and say so."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(f"written: {path.relative_to(root)}")


if __name__ == "__main__":
    run_script("bench_report", main)
