"""Stacked figures: all tokens by age, with what was dropped; all seconds by part."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.report.chart import Chart, Missing, Panel
from sg_rlhf.report.page import read_runs
from sg_rlhf.report.stacked_figures import PARTS, seconds_per_rollout, staleness
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.timing_keys import exclusive_seconds
from tests.unit.report.synthetic import SECONDS, write_run


def panel_of(chart: Chart) -> Panel:
    (panel,) = chart.panels
    assert isinstance(panel, Panel)
    return panel


def heights(chart: Chart) -> dict[str, list[float]]:
    """Label -> the height of its part at each rollout."""
    return {series.label: series.values for series in panel_of(chart).series}


def test_shares_are_whole_and_say_the_ages(tmp_path: Path) -> None:
    _, groups = read_runs([write_run(tmp_path / "run", rollouts=3)])
    # Rollout 1: 300 of 400 tokens by version 1; version 2 is the policy's.
    assert heights(staleness(groups)) == {
        "age 0": pytest.approx([100 / 400, 1.0, 1.0]),
        "age 1": pytest.approx([300 / 400, 0.0, 0.0]),
    }


def test_seconds_are_whole_and_in_one_part_each(tmp_path: Path) -> None:
    _, groups = read_runs(
        [write_run(tmp_path / f"s{seed}", rollouts=3, seed=seed) for seed in (0, 1)]
    )
    found = heights(seconds_per_rollout(groups))
    assert [sum(at) for at in zip(*found.values(), strict=True)] == pytest.approx([82.0] * 3)
    assert found["longest response"] == pytest.approx([12.0] * 3)
    sections = [name for names, _ in PARTS.values() for name in names]
    row = {f"timing/{name}": seconds for name, seconds in SECONDS.items()}
    assert sorted(sections) == sorted(exclusive_seconds(row))


@pytest.mark.parametrize(("first", "marked"), [(232.0, "rollout 1 is cut: 232 s"), (0.0, "")])
def test_a_first_rollout_that_is_cut_says_its_seconds(
    tmp_path: Path, first: float, marked: str
) -> None:
    run_dir = write_run(tmp_path / "run", rollouts=3)
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    (run_dir / jsonl_log.METRICS).unlink()
    if first:
        more = first - sum(exclusive_seconds(rows[0]).values())
        for key in ("timing/generation", "timing/step_total"):
            rows[0][key] += more
    jsonl_log.append(run_dir / jsonl_log.METRICS, rows)
    _, groups = read_runs([run_dir])
    panel = panel_of(seconds_per_rollout(groups))
    assert panel.title == marked and panel.top == pytest.approx(1.1 * 82.0)


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
