"""What a chart holds: its lines as they are declared, and its numbers as the page gets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.report.chart import Missing, Panel, Series, across, look, page_data, smooth, table_of
from sg_rlhf.report.figures import Line, lines, window_of
from sg_rlhf.report.page import read_runs
from tests.unit.report.synthetic import write_run

GROUPS = 18


def test_no_two_groups_of_a_study_have_the_same_line() -> None:
    assert len({(look(i)["colour"], look(i)["dash"]) for i in range(GROUPS)}) == GROUPS


def test_a_line_is_what_was_declared(tmp_path: Path) -> None:
    (run,), groups = read_runs([write_run(tmp_path / "run")])
    steps = Line("sg/weight_mean", "w", steps=True, band=("sg/weight_q05", "sg/weight_q95"))
    cut = Line("rollout/truncated_rate", "cut", scale="log", smooth=False)
    above, below = lines(steps, cut, missing="")(groups).panels
    assert isinstance(above, Panel) and isinstance(below, Panel)
    (series,) = above.series
    first = [row["sg/weight_mean"] for row in run.steps[:4]]
    ((_, raw), (_, second), *_) = series.curves[0]
    assert [raw, second] == pytest.approx([sum(first[:2]) / 2, sum(first[2:]) / 2])
    assert smooth(series.curves[0], series.window)[1][1] == pytest.approx(sum(first) / 4)
    assert series.window == window_of(groups) == 2 and series.interval is not None
    assert set(below.series[0].values) == {0.02} and below.series[0].window == 1
    assert (above.scale, below.scale) == ("auto", "log")
    zero = Line("sg/zeroed_pos_at_ratio1", "", steps=True, scale="log").panel(groups)
    assert zero.scale == "zero"


@pytest.mark.parametrize("needs", ["", "sg/n_nothing"])
def test_a_figure_without_data_is_its_sentence(tmp_path: Path, needs: str) -> None:
    _, groups = read_runs([write_run(tmp_path / "run")])
    line = Line("kl" if needs else "nothing", "", steps=True)
    with pytest.raises(Missing, match=r"^No KL\.$"):
        lines(line, missing="No KL.", needs=needs)(groups)


def test_seeds_are_compared_where_all_of_them_have_a_value() -> None:
    seeds = [[(1.0, 2.0), (2.0, 4.0), (3.0, 9.0)], [(1.0, 4.0), (3.0, 1.0)]]
    mean, low, high = across(seeds)
    assert mean == [(1.0, 3.0), (3.0, 5.0)]
    assert low == [(1.0, 2.0), (3.0, 1.0)] and high == [(1.0, 4.0), (3.0, 9.0)]
    panel = Panel("y", [Series("two", seeds, "s0"), Series("none", [], "s1")])
    assert table_of(panel) == [("two", ["3", "5", "3", "5"]), ("none", ["n/a"] * 4)]


def test_the_page_gets_every_curve_at_every_x() -> None:
    line = Series("line", [[(1.0, 0.123456), (3.0, 2.0)]], "s0", marks=[(3.0, 2.0)])
    points = Series("points", [[(2.0, 1.0)]], "s1", kind="points")
    data = page_data(Panel("y", [line, points]), limit=10)
    assert data["xs"] == [1, 2, 3]
    assert data["series"][0]["curves"] == [[0.1235, None, 2]]
    assert data["series"][0]["marks"] == [(3.0, 2.0)]
    assert data["series"][1]["curves"] == [[None, 1, None]]


def test_a_long_line_is_thinned_to_means_and_points_are_not() -> None:
    seeds = [[(float(x), float(x)) for x in range(1, n)] for n in (11, 8)]
    points = Series("points", [[(9.0, 1.0)]], "s1", kind="points")
    data = page_data(Panel("y", [Series("line", seeds, "s0"), points]), limit=5)
    assert data["xs"] == [2, 4, 6, 8, 9, 10]
    assert data["series"][0]["curves"] == [
        [1.5, 3.5, 5.5, 7.5, None, 9.5], [1.5, 3.5, 5.5, 7, None, None],
    ]  # fmt: skip
    assert data["series"][1]["curves"] == [[None, None, None, None, 1, None]]
