"""Groups look different, however many there are in a study; lines are as they are declared."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.report import drawing
from sg_rlhf.report.figures import Line, lines
from sg_rlhf.report.page import read_runs
from tests.unit.report.synthetic import write_run

GROUPS = 18


def test_no_two_groups_of_a_study_have_the_same_line() -> None:
    lines = {(drawing.color(i), str(drawing.style(i))) for i in range(GROUPS)}
    keys = {(i % len(drawing.SERIES), drawing.dashes(i)) for i in range(GROUPS)}
    assert len(lines) == len(keys) == GROUPS


def test_many_labels_do_not_cover_the_data() -> None:
    figure, (axes,) = drawing.subplots()
    before = figure.get_figheight()
    for index in range(GROUPS):
        axes.plot([0, 1], [index, index], label=f"group {index}")
    drawing.legend(axes)
    assert axes.get_legend() is None and len(figure.legends) == 1
    assert len(figure.legends[0].get_texts()) == GROUPS and figure.get_figheight() > before


def test_a_single_run_needs_no_legend(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"tau{tau}", overrides=(f"sg.weighting.tau={tau}",)) for tau in (9, 7)
    ]
    for count in (1, 2):
        _, groups = read_runs(runs[:count])
        assert len(groups) == count
        (axes,) = lines(Line("rollout/reward_mean", ""), missing="")(groups).axes
        assert (axes.get_legend() is not None) is (count == 2)


@pytest.mark.parametrize("values", [(5.0e-11, 5.03e-11), (3.1e-13, 1.2e-12), (0.002, 900.0)])
def test_labels_of_a_log_axis_are_short(values: tuple[float, float]) -> None:
    figure, (axes,) = drawing.subplots()
    axes.plot([0, 1], values)
    drawing.log_scale(axes)
    figure.draw_without_rendering()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    shown = [label for tick in ticks if (label := tick.label1.get_text())]
    assert len(shown) > 1 and max(map(len, shown)) <= len("5.01e-11"), shown


def test_a_line_is_drawn_as_it_is_declared(tmp_path: Path) -> None:
    (run,), groups = read_runs([write_run(tmp_path / "run")])
    steps = Line("sg/weight_mean", "w", steps=True, band=("sg/weight_q05", "sg/weight_q95"))
    cut = Line("rollout/truncated_rate", "cut", scale="share", smooth=False)
    figure = lines(steps, cut, missing="")(groups)
    above, below = figure.axes
    raw, smoothed = above.lines
    first = [row["sg/weight_mean"] for row in run.steps[:4]]
    assert list(raw.get_ydata())[:2] == pytest.approx([sum(first[:2]) / 2, sum(first[2:]) / 2])
    assert smoothed.get_ydata()[1] == pytest.approx(sum(first) / 4)
    assert len(above.collections) == 1 and below.get_xlabel() == "rollout"
    (line,) = below.lines
    assert set(line.get_ydata()) == {0.02} and below.get_ylim() == (0, 0.05)


@pytest.mark.parametrize("needs", ["", "sg/n_nothing"])
def test_a_figure_without_data_is_its_sentence(tmp_path: Path, needs: str) -> None:
    _, groups = read_runs([write_run(tmp_path / "run")])
    line = Line("kl" if needs else "nothing", "", steps=True)
    with pytest.raises(drawing.Missing, match=r"^No KL\.$"):
        lines(line, missing="No KL.", needs=needs)(groups)
