"""Charts as files: what matplotlib draws of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.report import drawing
from sg_rlhf.report.catalogue import FIGURES
from sg_rlhf.report.chart import Chart, Panel, Series, look
from sg_rlhf.report.figures import Line, lines
from sg_rlhf.report.page import read_runs
from tests.unit.report.synthetic import write_run


def test_labels_do_not_cover_the_data() -> None:
    def figure(count: int) -> drawing.Figure:
        series = [Series(f"{i}", [[(0.0, i), (1.0, i)]], **look(i)) for i in range(count)]
        return drawing.draw(Chart([Panel("", series)]))

    two, many = figure(2), figure(18)
    for found, count in ((two, 2), (many, 18)):
        assert found.axes[0].get_legend() is None
        assert len(found.legends[0].get_texts()) == count
    assert many.get_figheight() > two.get_figheight() > figure(1).get_figheight()


def test_a_single_run_needs_no_legend(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"tau{tau}", overrides=(f"sg.weighting.tau={tau}",)) for tau in (9, 7)
    ]
    for count in (1, 2):
        _, groups = read_runs(runs[:count])
        assert len(groups) == count
        figure = drawing.draw(lines(Line("rollout/reward_mean", ""), missing="")(groups))
        (axes,) = figure.axes
        assert len(figure.legends) == count - 1
        assert axes.get_xlabel() == "rollout (running mean of 2)"


@pytest.mark.parametrize("values", [(5.0e-11, 5.03e-11), (3.1e-13, 1.2e-12), (0.002, 900.0)])
def test_labels_of_a_log_axis_are_short(values: tuple[float, float]) -> None:
    figure, (axes,) = drawing.subplots()
    axes.plot([0, 1], values)
    drawing.log_scale(axes)
    figure.draw_without_rendering()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    shown = [label for tick in ticks if (label := tick.label1.get_text())]
    assert len(shown) > 1 and max(map(len, shown)) <= len("5.01e-11"), shown


def test_parts_stand_on_each_other() -> None:
    parts = [Series(name, [[(1.0, y)]], "s0", kind="stack") for name, y in (("a", 2.0), ("b", 3.0))]
    (axes,) = drawing.draw(Chart([Panel("", parts, scale="zero", top=6.0)])).axes
    assert [(bar.get_y(), bar.get_height()) for bar in axes.patches] == [(0, 2), (2, 3)]
    assert axes.get_ylim() == (0, 6)


def test_seeds_have_their_range_and_points_their_intervals() -> None:
    seeds = Series("line", [[(1.0, 1.0), (2.0, 2.0)], [(1.0, 3.0), (2.0, 4.0)]], "s0")
    ends = ([(1.0, 0.5)], [(1.0, 1.5)])
    points = Series("points", [[(1.0, 1.0)]], "s1", kind="points", interval=ends)
    (axes,) = drawing.draw(Chart([Panel("", [seeds, points])])).axes
    band, bars = axes.collections
    assert band.get_datalim(axes.transData).intervaly.tolist() == [1, 4]
    assert [segment.tolist() for segment in bars.get_segments()] == [[[1, 0.5], [1, 1.5]]]
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 2, 2, 1]


def test_names_are_no_mathematics(tmp_path: Path) -> None:
    _, groups = read_runs([write_run(tmp_path / name) for name in ("a$x_{", "b$y^{$")])
    for entry in FIGURES[:3]:
        drawing.draw(entry.chart(groups)).draw_without_rendering()
