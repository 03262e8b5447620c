"""The quality benchmark: its cells differ in what they say, it goes on where it was, and what agrees is computed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_quality
from benchmarks.bench_quality import Results
from benchmarks.plots import digest_of
from benchmarks.quality import CELLS, GROUPS, QUICK, Size, cells_of, losses
from benchmarks.quality_cell import KINDS, run_cell, write_text
from benchmarks.quality_plots import QUALITY_PLOTS
from benchmarks.quality_tables import (
    above,
    agreement,
    below,
    group_report,
    judgement,
    report,
    seeds,
    table,
    trend_sentence,
)

SIZE = Size()


def record(cell: str, seed: int, loss: float) -> dict[str, Any]:
    return {
        "cell": cell,
        "seed": seed,
        "loss": loss,
        "size": asdict(SIZE),
        "curve": [[0, 0, 5.5], [100, 1000, loss + 1], [200, 2000, loss]],
    }


def records_of(found: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Records of cells from their losses, seed by seed."""
    return [record(cell, seed, loss) for cell, each in found.items() for seed, loss in enumerate(each)]


# --- cells ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_does_all_its_inner_steps_in_whole_rounds(name: str) -> None:
    cell = CELLS[name]
    steps = cell.pretraining_steps(SIZE) + cell.rounds(SIZE) * cell.inner_steps_of(SIZE)
    assert steps == cell.steps_factor * SIZE.steps


def test_every_cell_answers_a_question_and_the_first_row_has_the_published_figure_to_compare_with() -> None:
    assert set(cells_of(list(GROUPS))) == set(CELLS)
    for group in GROUPS.values():
        assert group.rows[0].published is not None or not any(row.published for row in group.rows)


def test_rows_of_workers_that_come_and_go_stand_by_their_mean_number() -> None:
    for row in GROUPS["over-time"].rows:
        cell = CELLS[row.cell]
        plan, rounds = cell.plan(SIZE, 0), range(1, cell.rounds(SIZE) + 1)
        there = [sum(plan.is_there(name, round) for name in cell.names()) for round in rounds]
        assert sum(there) / len(there) == pytest.approx(row.at, rel=0.03)


def test_losses_follow_from_the_seed_have_their_share_and_leave_somebody_in_every_round() -> None:
    names = ["a", "b", "c"]
    lost = losses(names, 2000, share=0.3, seed=1)
    assert lost == losses(names, 2000, share=0.3, seed=1) != losses(names, 2000, share=0.3, seed=2)
    assert len(lost) / 6000 == pytest.approx(0.3 - 0.3**3, abs=0.03)
    assert all(any((name, round) not in lost for name in names) for round in range(1, 2001))


def test_kinds_of_text_have_the_same_size_and_nothing_in_common(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", QUICK)
    documents = {kind: [file.read_text() for file in sorted((text / kind).iterdir())] for kind in KINDS}
    assert {sum(map(len, each)) for each in documents.values()} == {QUICK.kind_bytes}
    assert len(set.union(*map(set, documents.values()))) == sum(map(len, documents.values()))


# --- runs ----------------------------------------------------------------------------------------------


def test_a_cell_counts_its_tokens_and_what_came_too_late() -> None:
    found = run_cell(CELLS["50 % lost"], QUICK, 0)
    tokens = QUICK.steps * QUICK.batch_size * QUICK.seq_len
    lost = losses(CELLS["DiLoCo"].names(), 4, share=0.5, seed=0)
    assert found["lost_share"] == len(lost) / 32
    assert found["tokens"] < 8 * tokens
    assert found["curve"][-1] == [QUICK.steps, found["tokens"], pytest.approx(found["loss"], rel=1e-5)]


def test_a_pretrained_cell_goes_on_from_what_one_worker_has_learnt() -> None:
    found = run_cell(CELLS["24 % pretrained"], QUICK, 0)
    before = QUICK.inner_steps * QUICK.batch_size * QUICK.seq_len
    assert found["curve"][0][:2] == [QUICK.inner_steps, before]
    assert found["curve"][0][2] < math.log(257) - 0.05  # knows something
    assert found["tokens"] == before + 8 * 3 * before


def test_cells_that_are_there_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--quick", "--only", "data", "--out", str(tmp_path / "found.jsonl")]
    assert bench_quality.main(command) == 0
    lines = (tmp_path / "found.jsonl").read_text().splitlines()
    assert [json.loads(line)["cell"] for line in lines] in (["DiLoCo", "by kind"], ["by kind", "DiLoCo"])
    monkeypatch.setattr(bench_quality, "PeerProcess", None)
    capsys.readouterr()
    assert bench_quality.main(command) == 0
    assert "| a kind each, k = 8 | " in capsys.readouterr().out
    results = Results(tmp_path / "found.jsonl")
    assert results.has("DiLoCo", 0, QUICK)
    assert not results.has("DiLoCo", 1, QUICK)
    assert not results.has("DiLoCo", 0, SIZE)
    monkeypatch.setitem(CELLS, "DiLoCo", CELLS["k = 4"])
    assert not results.has("DiLoCo", 0, QUICK)  # it is defined otherwise now


# --- what the results say ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "published", "said"),
    [
        ([-0.05, -0.02], -0.07, "agrees"),
        ([-0.05, 0.02], -0.07, "no difference here"),
        ([0.05, 0.02], -0.07, "does not agree"),
        ([0.001, -0.003], 0.0, "agrees"),
        ([0.04, 0.05], 0.004, "differs, none published"),
        ([0.04], 0.06, "agrees"),
    ],
)
def test_a_row_agrees_where_all_seeds_differ_in_the_published_direction(
    ours: list[float], published: float, said: str
) -> None:
    assert judgement(ours, published) == said


@pytest.mark.parametrize(
    ("slope", "said"),
    [
        (0.1, "it does here as well (15 pairs of rows: 15 in this order, 0 in the other, 0 without a difference)"),
        (-0.1, "it does not here (15 pairs of rows: 0 in this order, 15 in the other, 0 without a difference)"),
        (0.0, "no pair of rows differs (15 pairs of rows: 0 in this order, 0 in the other, 15 without a difference)"),
    ],
)
def test_the_trend_is_that_of_the_pairs_of_rows(slope: float, said: str) -> None:
    found = {row.cell: [2 + slope * place, 2.1 + slope * place] for place, row in enumerate(GROUPS["steps"].rows)}
    assert trend_sentence(records_of(found), "steps") == f"Published: perplexity rises with H; {said}."


def test_a_table_compares_seed_by_seed_and_says_what_is_missing() -> None:
    found = table(records_of({"one worker": [2.0, 2.5], "DiLoCo": [1.9, 2.41]}), "time").splitlines()
    assert found[2].split(" | ")[:2] == ["| one worker", "2.250 ± 0.354"]
    assert "| DiLoCo, 8 workers | 2.155 ± 0.361 | -9.1% (-9.5% to -8.6%) | -7.5% | agrees |" in found
    assert "| 8x batch, data parallel | not measured | | -5.7% | |" in found


def test_the_report_is_of_the_size_measured_last_and_counts_what_agrees() -> None:
    other = {**record("DiLoCo", 0, 9.0), "size": asdict(QUICK)}
    results = {"quality": [other, *records_of({"DiLoCo": [2.0], "by kind": [2.0], "Adam": [1.9]})]}
    whole = report(results, "quality")
    assert f"### {GROUPS['data'].question}\n\n{group_report(results['quality'][1:], 'data')}" in whole
    assert whole.count("### ") == len(GROUPS)
    assert agreement(results, "quality") == {"rows": 2, "agree": 1, "opposite": 1}


def test_seeds_are_those_that_every_cell_has() -> None:
    found = [record(cell, seed, 2.0) for cell in CELLS for seed in range(3)]
    assert seeds({"quality": found}, "quality") == 3
    assert seeds({"quality": found[1:]}, "quality") == 2
    assert seeds({"quality": found[3:]}, "quality") == 0


def test_perplexities_are_set_against_those_of_the_same_seeds() -> None:
    results = {"quality": records_of({"one worker": [2.0, 3.0], "DiLoCo": [2.0 + math.log(0.9), 3.0 + math.log(0.8)]})}
    assert above(results, "quality", "one worker") == pytest.approx({"one worker": 0.0, "DiLoCo": -0.15})
    assert below(results, "quality", "one worker")["DiLoCo"] == pytest.approx(0.15)


def test_every_plot_is_painted_from_records_of_all_cells() -> None:
    figure = pytest.importorskip("matplotlib.figure")
    results = {"quality": [record(cell, seed, 2 + seed / 10) for cell in CELLS for seed in range(2)]}
    for plot in QUALITY_PLOTS.values():
        axes = figure.Figure(layout="constrained").add_subplot()
        plot.paint(axes, results)
        assert axes.lines
        assert digest_of(plot, results, "") != digest_of(plot, {}, "")
