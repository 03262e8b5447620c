"""README and docs/benchmarks.md say what the results say, and whatever keeps them from it is found."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_report
from benchmarks.bench_report import PLOTS, ROOT, Sources, compose, plot_path
from benchmarks.plots import draw
from benchmarks.template import TemplateError, fill


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what the report reads and writes."""
    for folder in ("benchmarks", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


@pytest.fixture
def check(clone: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Checks the copy and returns the lines; the exit code tells whether there are any, and nothing changes."""

    def run() -> list[str]:
        before = contents(clone)
        code = bench_report.main(["--check"], root=clone)
        lines = capsys.readouterr().err.splitlines()
        assert (code, contents(clone)) == (1 if lines else 0, before)
        return lines

    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, change: Callable[[str], str]) -> None:
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)


def edit_newest(clone: Path, benchmark: str, **fields: Any) -> None:
    """Other values for fields of the newest record; None takes the field away."""
    path = clone / "benchmarks" / "results" / f"{benchmark}.jsonl"
    *earlier, newest = path.read_text().splitlines()
    record = {name: value for name, value in {**json.loads(newest), **fields}.items() if value is not None}
    path.write_text("\n".join([*earlier, json.dumps(record)]) + "\n")


def newest(clone: Path, benchmark: str) -> dict[str, Any]:
    """Its newest record."""
    record: dict[str, Any] = json.loads(
        (clone / "benchmarks" / "results" / f"{benchmark}.jsonl").read_text().split("\n")[-2]
    )
    return record


def test_documents_in_the_repository_say_what_its_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = bench_report.main(["--check"]), capsys.readouterr()
    assert (code, said.err) == (0, "")
    assert said.out == "docs/benchmarks.md, README.md and 13 plots are what the results say\n"


def test_other_results_are_found_in_every_document_and_plot(clone: Path, check: Callable[[], list[str]]) -> None:
    before = newest(clone, "kill")["median_s"]
    edit_newest(clone, "kill", median_s=98.76)
    lines = "\n".join(check())
    assert re.search(rf'^docs/benchmarks.md line \d+ says "{before:.2f}" where the results say "98.76"$', lines, re.M)
    assert re.search(rf'^README.md line \d+ says "{before:.1f}" where the results say "98.8"$', lines, re.M)
    assert "docs/figures/kill.svg is not drawn from these results as now: run ./launch.sh bench report" in lines
    assert len(lines.splitlines()) == 3


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_a_figure_changed_by_hand_is_found(clone: Path, check: Callable[[], list[str]], document: str) -> None:
    figure = f"{newest(clone, 'worker')['phase_ratio']:.3f}"
    edit(clone / document, lambda text: text.replace(figure, "7.777"))
    (line,) = check()
    assert re.fullmatch(rf'{document} line \d+ says "7.777" where the results say "{figure}"', line)


def test_a_document_that_is_not_there_is_found(clone: Path, check: Callable[[], list[str]]) -> None:
    (clone / "docs" / "benchmarks.md").unlink()
    assert check()


def test_missing_records_and_fields_name_the_placeholder_and_the_benchmark_to_run(
    clone: Path, check: Callable[[], list[str]]
) -> None:
    (clone / "benchmarks" / "results" / "kill.jsonl").unlink()
    edit_newest(clone, "join", ratio=None)
    edit_newest(clone, "soak", join_s=None)
    lines = "\n".join(check())
    assert "{kill.median_s:.1f}: benchmarks/results/kill.jsonl has no record: run ./launch.sh bench kill\n" in lines
    assert "{join.ratio:.2f}: benchmarks/results/join.jsonl has no field ratio: run ./launch.sh bench join\n" in lines
    soak = ".venv/bin/python benchmarks/soak.py --out benchmarks/results/soak.jsonl"
    assert f"{{soak.join_s.median:.1f}}: benchmarks/results/soak.jsonl has no field join_s: run {soak}\n" in lines


def test_a_line_that_is_no_record_is_found(clone: Path, check: Callable[[], list[str]]) -> None:
    path = clone / "benchmarks" / "results" / "soak.jsonl"
    edit(path, lambda text: text + "[1\n")
    number = len(path.read_text().splitlines())
    assert check()[0].startswith(f"benchmarks/results/soak.jsonl line {number} is no JSON object: run ")


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("{kill.mean_s:.1f}", "benchmarks/results/kill.jsonl has no field mean_s: run ./launch.sh bench kill"),
        ("{speed.median_s}", "there is no benchmark speed: correct the name"),
        ("{kill.each:.1f}", "cannot be written like that"),
        ("{kill.values!k}", "there is no conversion k"),
        ("{kill.median s}", "{ is part of no placeholder"),
        ("takes 0.47 s", "0.47 is typed: figures come from placeholders"),
    ],
)
def test_a_placeholder_without_a_source_is_found(
    clone: Path, check: Callable[[], list[str]], typed: str, problem: str
) -> None:
    template = clone / "benchmarks" / "readme.in.md"
    edit(template, lambda text: f"{text}\n{typed}\n")
    lines = check()
    assert lines[0].startswith(f"benchmarks/readme.in.md line {template.read_text().count(chr(10))}: ")
    assert problem in lines[0]


def test_a_sentence_that_the_results_no_longer_bear_out_is_found(clone: Path, check: Callable[[], list[str]]) -> None:
    edit_newest(clone, "kill", each=[{"digests": 2, "resynced": 0}])
    assert [line.partition(": ")[2] for line in check()] == [
        "{kill.has_same_bits!t}: this does not hold in the results: change the sentence"
    ]


def test_a_cost_model_of_rounds_measured_since_is_found(clone: Path, check: Callable[[], list[str]]) -> None:
    edit_newest(clone, "wan", round_s=9.0)
    assert any("{cost.is_of_these_rounds!t}" in line for line in check())


def test_results_cited_outside_the_block_are_found(clone: Path, check: Callable[[], list[str]]) -> None:
    edit(clone / "README.md", lambda text: f"{text}\n1.1 s (`benchmarks/results/kill.jsonl`)\n")
    (line,) = check()
    number = (clone / "README.md").read_text().count("\n")
    assert line.startswith(f"README.md line {number} cites benchmarks/results/ outside the block")


def test_a_readme_without_the_block_is_found(clone: Path, check: Callable[[], list[str]]) -> None:
    edit(clone / "README.md", lambda text: text.replace(bench_report.END, ""))
    assert check()[0].startswith("README.md has no block between <!--")


def test_results_that_no_document_shows_are_found(clone: Path, check: Callable[[], list[str]]) -> None:
    (clone / "benchmarks" / "results" / "codec.jsonl").write_text("{}\n")
    assert check() == ["benchmarks/benchmarks.in.md has no section for benchmarks/results/codec.jsonl"]


def test_writing_brings_back_what_was_changed_and_a_second_time_changes_nothing(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = contents(clone)
    edit(clone / "README.md", lambda text: text.replace(f"{newest(clone, 'worker')['phase_ratio']:.3f}", "7.777"))
    (clone / "docs" / "benchmarks.md").unlink()
    assert bench_report.main([], root=clone) == 0
    assert contents(clone) == written
    assert capsys.readouterr().out.splitlines() == ["written: docs/benchmarks.md", "written: README.md"]
    assert bench_report.main([], root=clone) == 0
    assert (contents(clone), capsys.readouterr().out) == (written, "")


def test_a_plot_drawn_twice_has_the_same_bytes_and_knows_what_it_was_drawn_from(clone: Path) -> None:
    results = Sources(clone).results
    image = draw(PLOTS["worker"], results, "0123456789abcdef")
    assert image == draw(PLOTS["worker"], results, "0123456789abcdef")
    assert b"drawn from 0123456789abcdef" in image
    assert b"<text" not in image  # but paths: no fonts needed
    assert b"dc:date" not in image


def test_without_matplotlib_one_line_names_the_extra_and_nothing_is_written(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    edit_newest(clone, "kill", median_s=98.76)
    before = contents(clone)
    assert bench_report.main([], root=clone) == 64
    assert contents(clone) == before
    assert capsys.readouterr().err.endswith(".venv/bin/pip install -e '.[bench]'\n")


def test_every_plot_is_shown_and_small_and_nothing_written_names_this_machine(clone: Path) -> None:
    pages, problems = compose(clone, Sources(clone))
    assert not problems
    shown = re.findall(r"\(figures/([\w-]+)\.svg\)", pages[0].written)
    assert sorted(shown) == sorted(PLOTS) == sorted(path.stem for path in (ROOT / "docs" / "figures").iterdir())
    for name in PLOTS:
        image = plot_path(ROOT, name).read_bytes()
        assert len(image) < 60_000
        assert str(ROOT).encode() not in image
    assert all(str(path) not in page.written for page in pages for path in (clone, ROOT))


def test_a_template_is_filled_and_its_paragraphs_are_wrapped_but_not_within_code() -> None:
    values = {"a.n": 25_000_000, "a.s": 0.1093, "a.k": 4, "a.share": 0.857, "a.holds": True}
    text = "{a.n!M:g}M values,\n{a.s!m:.0f} ms, {a.k!w} workers, {a.share:.0%}{a.holds!t}\n\n| {a.k} |\n| {a.n:,} |\n"
    assert fill(text, values.__getitem__) == ("25M values, 109 ms, four workers, 86 %\n\n| 4 |\n| 25,000,000 |\n", [])
    filled, _ = fill("word " * 22 + "`some code with spaces` at the end", values.__getitem__)
    assert filled.splitlines()[1] == "`some code with spaces` at the end"


def test_all_problems_of_a_template_are_told_with_their_lines() -> None:
    def value_of(path: str) -> object:
        raise TemplateError(f"no {path}")

    _, problems = fill("{a.b}\n\n12 s and `12 s`\n{c.d:.1f} int8\n", value_of)
    assert problems == [
        (1, "{a.b}: no a.b"),
        (3, "12 is typed: figures come from placeholders"),
        (4, "{c.d:.1f}: no c.d"),
    ]
