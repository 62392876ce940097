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
