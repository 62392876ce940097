"""Groups look different, however many there are in a study."""

from __future__ import annotations

from sg_rlhf.report import drawing

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
