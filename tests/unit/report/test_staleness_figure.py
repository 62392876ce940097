"""The figure of an asynchronous run: all that was sampled, by age, and what was dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.report.figures import Missing
from sg_rlhf.report.page import read_runs
from sg_rlhf.report.staleness_figures import staleness
from sg_rlhf.run_dir import jsonl_log
from tests.unit.report.synthetic import write_run


def test_bars_are_whole_and_say_the_ages(tmp_path: Path) -> None:
    _, groups = read_runs([write_run(tmp_path / "run", rollouts=3)])
    figure = staleness(groups)
    (axes,) = figure.axes
    # Rollout 1: 300 of 400 tokens by version 1, 100 more were dropped; version 2 is the policy's.
    heights = {c.get_label(): [bar.get_height() for bar in c] for c in axes.containers}
    assert heights == {
        "age 0": pytest.approx([100 / 500, 1.0, 400 / 500]),
        "age 1": pytest.approx([300 / 500, 0.0, 0.0]),
        "age 2": pytest.approx([0.0, 0.0, 0.0]),
        "dropped": pytest.approx([100 / 500, 0.0, 100 / 500]),
    }


def test_of_a_synchronous_run_a_sentence(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    (run_dir / jsonl_log.METRICS).unlink()
    jsonl_log.append(
        run_dir / jsonl_log.METRICS,
        [{k: v for k, v in row.items() if not k.startswith("async/")} for row in rows],
    )
    _, groups = read_runs([run_dir])
    with pytest.raises(Missing, match="synchronous"):
        staleness(groups)
