"""Accuracy of several evaluation sets: training prompts are no part of what is held out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sg_rlhf.report import figures, page, summary
from sg_rlhf.report.chart import Chart, Missing, Panel, across
from sg_rlhf.report.evaluations import (
    held_out_accuracy,
    held_out_label,
    held_out_sets,
    set_names,
    set_of,
    sets_accuracy,
    training_sets,
)
from sg_rlhf.report.runs import Group, Run, read_run
from sg_rlhf.run_dir import jsonl_log
from tests.unit.report.synthetic import SIZES, write_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path / "run", sets=True))


def expected(row: dict[str, float]) -> tuple[float, float]:
    """Mean and half width over held_out and larger, from the row itself."""
    mean = (row["eval_held_out_accuracy"] + row["eval_larger_accuracy"]) / 2
    widths = (row["eval_held_out_accuracy_ci95"], row["eval_larger_accuracy_ci95"])
    return mean, math.sqrt(widths[0] ** 2 + widths[1] ** 2) / 2


def test_the_set_of_the_training_file_is_training_data(run: Run) -> None:
    assert set_names(run) == ["held_out", "train", "larger"]
    assert training_sets(run) == {"train"}
    assert held_out_sets(run) == ["held_out", "larger"]
    assert held_out_label(run) == "mean of held_out and larger"


def test_paths_are_compared_as_they_resolve(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parent)
    run.settings["data.prompt_dataset"] = "./run/../train.jsonl, other.jsonl"
    assert training_sets(run) == {"train"}
    run.settings["data.prompt_dataset"] = "elsewhere/train.jsonl"
    assert training_sets(run) == set()
    assert held_out_label(run) == "mean of held_out and train and larger"


def test_another_split_of_the_training_data_is_held_out(run: Run) -> None:
    run.settings["sg.eval_sets"] = [{"name": "train", "dataset": "org/puzzles"}]
    run.settings.update({"data.prompt_dataset": "org/puzzles", "eval.split": "test"})
    assert training_sets(run) == set()
    run.settings["eval.split"] = "train"
    assert training_sets(run) == {"train"} and held_out_accuracy(run) == []


def test_held_out_accuracy_is_the_mean_of_the_other_sets(run: Run) -> None:
    points = held_out_accuracy(run)
    assert [point.step for point in points] == [0, 6, 12]
    for point, row in zip(points, run.evaluations, strict=True):
        assert (point.accuracy, point.half_width) == pytest.approx(expected(row))
        assert point.prompts == 140 + 110


def test_all_sets_together_are_what_the_trainer_logs(run: Run) -> None:
    for point, row in zip(sets_accuracy(run, set_names(run)), run.evaluations, strict=True):
        logged = (row["eval_accuracy"], row["eval_accuracy_ci95"], row["eval_num_prompts"])
        assert (point.accuracy, point.half_width, point.prompts) == pytest.approx(logged)


def test_without_sets_it_is_the_accuracy_of_the_row(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert [(p.accuracy, p.half_width, p.prompts) for p in held_out_accuracy(run)] == [
        (row["eval_accuracy"], 0.03, 600.0) for row in run.evaluations
    ]
    assert held_out_label(run) == ""


def test_a_row_that_lacks_a_set_is_left_out(run: Run) -> None:
    del run.evaluations[1]["eval_larger_accuracy"]
    assert [point.step for point in held_out_accuracy(run)] == [0, 12]


def test_a_source_belongs_to_the_longest_name() -> None:
    assert set_of("train_kk_2ppl", ["train", "larger"]) == "train"
    assert set_of("kk_train_kk_2ppl", ["kk", "kk_train"]) == "kk_train"
    assert set_of("trainer", ["train"]) is None


def test_the_page_says_the_numbers_of_the_rows_and_their_sets(run: Run) -> None:
    text = page.build(*page.read_runs([run.path]))
    first, last = (expected(row) for row in (run.evaluations[0], run.evaluations[-1]))
    cell = f"{first[0]:.3f} ± {first[1]:.3f} → {last[0]:.3f} ± {last[1]:.3f}"
    assert f"<td>{cell}<small>mean of held_out and larger</small></td>" in text
    assert "held out: mean of held_out and larger" in text


def panels_of(chart: Chart) -> list[Panel]:
    return [panel for panel in chart.panels if isinstance(panel, Panel)]


def test_the_headline_figure_draws_the_held_out_mean(run: Run) -> None:
    (panel,) = panels_of(figures.accuracy([Group("run", (run,))]))
    points, training = panel.series
    assert points.kind == "points" and training.label == "training prompts"
    assert points.values == pytest.approx([expected(row)[0] for row in run.evaluations])
    assert points.interval is not None
    widths = [high - y for (_, high), y in zip(points.interval[1], points.values, strict=True)]
    assert widths == pytest.approx([expected(row)[1] for row in run.evaluations])


@pytest.mark.parametrize("seeds", [1, 2])
def test_every_set_has_a_panel_with_its_own_numbers(tmp_path: Path, seeds: int) -> None:
    runs = [read_run(write_run(tmp_path / f"s{i}", seed=i, sets=True)) for i in range(seeds)]
    panels = panels_of(figures.accuracy_by_set([Group("run", tuple(runs))]))
    titles = [panel.title for panel in panels]
    assert titles[:3] == ["held_out", "train: training prompts", "larger"]
    assert titles[3:5] == ["held_out: 2 people", "held_out: 3 people"]
    assert titles[5:7] == [f"train: {n} people: training prompts" for n in (2, 3)]
    of_sources = [f"{name}_kk_{n}ppl" for name in ("held_out", "train") for n in (2, 3)]
    for panel, name in zip(panels, set_names(runs[0]) + of_sources, strict=True):
        mean = across(panel.series[0].curves)[0]
        rows = zip(*(run.evaluations for run in runs), strict=True)
        values = [[row[f"eval_{name}_accuracy"] for row in at] for at in rows]
        assert [y for _, y in mean] == pytest.approx([sum(v) / seeds for v in values])


def test_a_run_of_one_data_set_has_a_panel_per_source(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    panels = panels_of(figures.accuracy_by_set([Group("run", (run,))]))
    assert [panel.title for panel in panels] == [f"{size} people" for size in SIZES]
    run = replace(run, evaluations=[])
    with pytest.raises(Missing, match=r"No evaluation names its sets"):
        figures.accuracy_by_set([Group("run", (run,))])


def test_the_summary_is_of_the_held_out_sets(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary.main([str(run.path)]) == 0
    text = capsys.readouterr().out
    (before, _), (after, width) = (expected(run.evaluations[i]) for i in (0, -1))
    assert f"{before:.3f} +- " in text and f"{after:.3f} +- {width:.3f}" in text
    assert "(250 prompts, 95 % intervals)" in text and "mean of held_out and larger" in text
    written = json.loads((run.path / "summary.json").read_text())
    assert written["accuracy_after"] == pytest.approx(after)
    assert written["held_out_sets"] == ["held_out", "larger"]
    assert jsonl_log.read(run.path / jsonl_log.EVALUATIONS)[-1]["eval_accuracy"] > after
