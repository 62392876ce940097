"""The figures about what was evaluated: each set along training, each data source at the end."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import INK
from sg_rlhf.report.evaluations import set_names, set_of, sets_accuracy, training_sets
from sg_rlhf.report.figures import (
    Missing,
    accuracy_curve,
    draw_evaluated,
    interval,
    source_name,
    sources,
)
from sg_rlhf.report.runs import Group
from sg_rlhf.report.text import drawn

#: Inches; of a figure that takes the width of the page.
WIDE, PANEL_HEIGHT = 8.0, 2.3
PANELS_IN_A_ROW = 3
#: Fit side by side below the bars.
TICK_LETTERS = 36


def accuracy_by_set(groups: list[Group]) -> Figure:
    """Accuracy on each set of ``sg.eval_sets`` along training, one panel each."""
    runs = [run for group in groups for run in group.runs]
    names = list(dict.fromkeys(name for run in runs for name in set_names(run)))
    names = [name for name in names if any(sets_accuracy(run, [name]) for run in runs)]
    if not names:
        raise Missing("The runs evaluate one data set rather than several (sg.eval_sets).")
    columns = min(PANELS_IN_A_ROW, len(names))
    rows = math.ceil(len(names) / columns)
    figure, panels = drawing.subplots(
        rows, columns, width=WIDE, height=0.5 + PANEL_HEIGHT * rows, sharey=True
    )
    for panel, name in zip(panels, names, strict=False):
        _set_panel(panel, groups, name)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    for panel in panels[::columns]:
        panel.set_ylabel("share correct")
    top = min(1.0, 1.05 * panels[0].get_ylim()[1])
    panels[0].set_ylim(-0.02 * top, top)  # a line at 0 must be seen whole
    drawing.legend_of_figure(panels)
    return figure


def _set_panel(axes: Axes, groups: list[Group], name: str) -> None:
    for index, group in enumerate(groups):
        points = [sets_accuracy(run, [name]) for run in group.runs]
        if len(group.runs) == 1:
            draw_evaluated(axes, points, index, drawn(group.label))
        else:
            curves = [accuracy_curve(found) for found in points]
            drawing.draw_seeds(axes, curves, index, drawn(group.label))
    axes.set_title(drawn(f"{name}{_kind(groups, name)}"), loc="left", fontsize=9)
    drawing.whole_numbers(axes)


def _kind(groups: list[Group], name: str) -> str:
    trained = {name in training_sets(run) for group in groups for run in group.runs}
    if trained == {True}:
        return ": training prompts"
    return ": training prompts of some runs" if True in trained else ""


def held_out_sources(groups: list[Group]) -> list[str]:
    """What the evaluations name, without the sets that any of the runs trains on."""
    runs = [run for group in groups for run in group.runs]
    sets = {name for run in runs for name in set_names(run)}
    trained = {name for run in runs for name in training_sets(run)}
    found = sources([row for run in runs for row in run.evaluations])
    return [source for source in found if set_of(source, sets) not in trained]


def accuracy_by_source(groups: list[Group]) -> Figure:
    """Held-out accuracy by data source (Figure 4), first and last evaluation."""
    names = held_out_sources(groups)
    if not names:
        raise Missing("No held-out evaluation names its data sources.")
    figure, (axes,) = drawing.subplots()
    width = 0.8 / len(groups)
    last_rollouts = [_last_rollouts(group) for group in groups]
    same = len(set(last_rollouts)) == 1
    for index, group in enumerate(groups):
        label = drawn(group.label if same else f"{group.label}, {last_rollouts[index]}")
        for place, name in enumerate(names):
            x = place - 0.4 + (index + 0.5) * width
            evaluated = [found for run in group.runs if (found := sets_accuracy(run, [name]))]
            if not evaluated:
                continue
            _, (mean,), error = interval([[replace(points[-1], step=0)] for points in evaluated])
            axes.bar(
                x, mean, width * 0.92, **drawing.fill(index), yerr=error, label=label,
                error_kw={"elinewidth": 1, "capsize": 2.5, "ecolor": INK},
            )  # fmt: skip
            label = "_nolegend_"
            first = [points[0].accuracy for points in evaluated if len(points) > 1]
            if first:
                start = statistics.fmean(first)
                axes.plot([x - width * 0.46, x + width * 0.46], [start] * 2, color=INK, lw=1.4)
    axes.plot([], [], color=INK, lw=1.4, label="first evaluation")
    axes.set_xticks(range(len(names)), [drawn(source_name(name)) for name in names])
    if len("".join(map(source_name, names))) > TICK_LETTERS:
        axes.tick_params(axis="x", labelrotation=20)
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 1)
    axes.set_ylabel("held-out accuracy" + (f", {last_rollouts[0]}" if same else ""))
    drawing.legend(axes, "above")
    return figure


def _last_rollouts(group: Group) -> str:
    """Which evaluation is the last: runs of different length must not pass as equals."""
    last = {int(run.evaluations[-1]["global_step"]) for run in group.runs if run.evaluations}
    return f"rollout {'-'.join(map(str, sorted({min(last), max(last)})))}" if last else "none"
