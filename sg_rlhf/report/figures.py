"""The figures of a training: from groups of runs to a matplotlib figure.

:func:`lines` makes the plain ones; ``catalogue.py`` declares them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sg_rlhf.common.statistics import spikes
from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import INK, MUTED, Missing
from sg_rlhf.report.evaluations import (
    Evaluated,
    held_out_accuracy,
    held_out_label,
    set_names,
    set_of,
    sets_accuracy,
    sources,
    training_sets,
)
from sg_rlhf.report.runs import Curve, Group, Run, curve, per_rollout
from sg_rlhf.report.samples import probability_histogram
from sg_rlhf.report.text import drawn, one_line
from sg_rlhf.report.weighting import weighting_of
from sg_rlhf.tasks import registry

CURVE_POINTS = 401
HISTOGRAM_BINS = 20
#: Inches; of each further panel of a narrow figure.
PANEL_HEIGHT = 1.0


@dataclass(frozen=True)
class Line:
    """A panel with a line per group, over the rollouts.

    Attributes:
        key: of ``metrics.jsonl``; with ``steps`` of ``optimizer_steps.jsonl``, whose rows are
            averaged over each rollout.
        label: of the y axis.
        scale: ``zero`` begins at 0; ``share`` as well, and reaches .05 at least; ``log`` where all
            values are above 0, else as ``zero``.
        smooth: whether the thick line is a running mean.
        band: keys of a lower and an upper value, for groups of one run.
    """

    key: str
    label: str
    steps: bool = False
    scale: Literal["auto", "zero", "share", "log"] = "auto"
    smooth: bool = True
    band: tuple[str, str] | None = None

    def curve(self, run: Run, key: str = "") -> Curve:
        """(rollout, value) of a run."""
        read = per_rollout if self.steps else curve
        return read(run.steps if self.steps else run.metrics, key or self.key)


REWARD = Line("rollout/reward_mean", "mean training reward")


def lines(*panels: Line, missing: str, needs: str = "") -> Callable[[list[Group]], Figure]:
    """A function that draws the panels below each other.

    Args:
        missing: the sentence for runs that do not log the first panel's value.
        needs: a key of ``metrics.jsonl`` that has to be above 0 in some row.
    """

    def draw(groups: list[Group]) -> Figure:
        rows = [row for group in groups for run in group.runs for row in run.metrics]
        if needs and not any(row.get(needs) for row in rows):
            raise Missing(missing)
        figure, axes = drawing.subplots(
            len(panels), height=drawing.HEIGHT + PANEL_HEIGHT * (len(panels) - 1), sharex=True
        )
        for panel, at in zip(panels, axes, strict=True):
            if not _draw_lines(at, groups, panel) and panel is panels[0]:
                raise Missing(missing)
        for at in axes[:-1]:
            at.set_xlabel("")
        drawing.legend(axes[0])
        return figure

    return draw


def _draw_lines(axes: Axes, groups: list[Group], line: Line) -> bool:
    """The panel of a line; returns whether any run has values."""
    window = _window(groups) if line.smooth else 1
    values = []
    for index, group in enumerate(groups):
        curves = [line.curve(run) for run in group.runs]
        drawing.draw_seeds(axes, curves, index, drawn(group.label), window=window)
        values += [y for points in curves for _, y in points]
        if line.band and len(group.runs) == 1:
            low, high = (dict(line.curve(group.runs[0], key)) for key in line.band)
            xs = sorted(low.keys() & high.keys())
            axes.fill_between(
                xs, [low[x] for x in xs], [high[x] for x in xs], color=drawing.color(index),
                alpha=0.16, linewidth=0,
            )  # fmt: skip
    if line.scale == "log" and values and min(values) > 0:
        drawing.log_scale(axes)
    elif line.scale != "auto":
        top = 1.05 * axes.get_ylim()[1]
        axes.set_ylim(0, max(0.05, top) if line.scale == "share" else top)
    axes.set_ylabel(line.label)
    drawing.whole_numbers(axes, _smoothing(window))
    return bool(values)


def _window(groups: list[Group]) -> int:
    return drawing.window_of(min(len(run.metrics) for group in groups for run in group.runs))


def _smoothing(window: int) -> str:
    return f"rollout (running mean of {window})" if window > 1 else "rollout"


def norm_curve(run: Run) -> Curve:
    """(optimizer step, gradient norm before clipping)."""
    return curve(run.steps, "actor_grad_norm", "optimizer_step")


def grad_norm(groups: list[Group]) -> Figure:
    """Gradient norm of every optimizer step before clipping, spikes marked (Figure 1)."""
    figure, (axes,) = drawing.subplots()
    norms: list[float] = []
    for index, group in enumerate(groups):
        curves = [points for run in group.runs if (points := norm_curve(run))]
        found = [[points[i] for i in spikes([y for _, y in points])] for points in curves]
        count = sum(map(len, found))
        counted = f"{count} spike{'s' * (count != 1)}"
        drawing.draw_seeds(axes, curves, index, f"{drawn(group.label)}: {counted}")
        if len(groups) == 1:  # there is no legend
            axes.set_title(counted, loc="left", fontsize=8.5, color=MUTED)
        for points in filter(None, found):
            axes.scatter(
                [x for x, _ in points], [y for _, y in points], s=26, marker="v", zorder=4,
                facecolor=drawing.color(index), edgecolor=INK, linewidth=0.7,
            )  # fmt: skip
        norms += [y for points in curves for _, y in points]
    if not norms:
        raise Missing("optimizer_steps.jsonl has no gradient norm.")
    if max(norms) > 10 * statistics.median(norms) and min(norms) > 0:
        drawing.log_scale(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("L2 norm before clipping")
    drawing.whole_numbers(axes, "optimizer step")
    drawing.legend(axes)
    return figure


# -- accuracy --------------------------------------------------------------------------------------


def accuracy(groups: list[Group]) -> Figure:
    """Held-out accuracy with its 95 % interval, and accuracy on the training prompts."""
    figure, (axes,) = drawing.subplots()
    _accuracy(axes, groups)
    return figure


def reward_and_accuracy(groups: list[Group]) -> Figure:
    """Training reward above accuracy: the picture that a run ends with."""
    figure, (top, bottom) = drawing.subplots(2, width=7.0, height=5.4, sharex=True)
    if not _draw_lines(top, groups, REWARD):
        raise Missing("No rollout has a mean reward.")
    top.set_xlabel("")
    drawing.legend(top)
    with contextlib.suppress(Missing):
        _accuracy(bottom, groups)
    return figure


def _accuracy(axes: Axes, groups: list[Group]) -> None:
    window = _window(groups)
    any_drawn = False
    labels = {held_out_label(run) for group in groups for run in group.runs}
    same = len(labels) == 1
    for index, group in enumerate(groups):
        color = drawing.color(index)
        for points in [curve(run.metrics, "rollout/accuracy") for run in group.runs]:
            values = drawing.smooth([y for _, y in points], window)
            axes.plot([x for x, _ in points], values, color=color, alpha=drawing.THIN, lw=0.9)
            any_drawn |= bool(points)
        # What the held-out accuracy is of, where that is not the same everywhere.
        sets = "" if same else held_out_label(group.runs[0])
        name = drawn(f"{group.label}: {sets}" if sets else group.label)
        any_drawn |= _draw_evaluated(axes, [held_out_accuracy(r) for r in group.runs], index, name)
    if not any_drawn:
        raise Missing("There is neither a held-out evaluation nor accuracy on training prompts.")
    axes.set_ylim(0, 1)
    axes.set_ylabel("share correct")
    if same and any(labels):
        axes.set_title(f"held out: {drawn(labels.pop())}", loc="left", fontsize=8.5, color=MUTED)
    drawing.whole_numbers(axes)
    drawing.legend(axes)


def _draw_evaluated(axes: Axes, runs: list[list[Evaluated]], index: int, label: str) -> bool:
    """Points of one group, with the interval of one run or the range of the seeds.

    Returns:
        Whether there were any.
    """
    runs = [points for points in runs if points]
    if not runs:
        return False
    xs, ys, low, high = drawing.band([[(float(p.step), p.accuracy) for p in r] for r in runs])
    # A mean of equal values may be rounded to the other side of them.
    errors = [
        [max(0.0, y - a) for y, a in zip(ys, low, strict=True)],
        [max(0.0, b - y) for y, b in zip(ys, high, strict=True)],
    ]
    if len(runs) == 1:
        widths = [p.half_width if math.isfinite(p.half_width) else 0.0 for p in runs[0]]
        errors = [widths, widths]
    axes.errorbar(
        xs, ys, yerr=errors, marker="o", ms=4, capsize=2.5, lw=1.7, color=drawing.color(index),
        ls=drawing.style(index), label=label,
    )  # fmt: skip
    return True


def accuracy_by_set(groups: list[Group]) -> Figure:
    """Accuracy on each set of ``sg.eval_sets`` and each data source along training."""
    runs = [run for group in groups for run in group.runs]
    sets = list(dict.fromkeys(name for run in runs for name in set_names(run)))
    found = sources(row for run in runs for row in run.evaluations)
    names = [name for name in sets if name in found] + [n for n in found if n not in sets]
    if not names:
        raise Missing("No evaluation names its sets or data sources.")
    figure, panels = drawing.wide_panels(len(names), "share correct")
    for panel, name in zip(panels, names, strict=False):
        for index, group in enumerate(groups):
            points = [sets_accuracy(run, [name]) for run in group.runs]
            _draw_evaluated(panel, points, index, drawn(group.label))
        trained = {set_of(name, sets) in training_sets(run) for run in runs}
        some = "" if len(trained) == 1 else " of some runs"
        title = f"{source_name(name)}{f': training prompts{some}' if True in trained else ''}"
        panel.set_title(drawn(title), loc="left", fontsize=9)
        drawing.whole_numbers(panel)
    top = min(1.0, 1.05 * panels[0].get_ylim()[1])
    panels[0].set_ylim(-0.02 * top, top)  # a line at 0 must be seen whole
    drawing.legend_of_figure(panels)
    return figure


def source_name(source: str) -> str:
    """A data source as its domain calls it, also behind the name of a set; others as they are."""
    for pattern, title in _source_titles():
        match = re.fullmatch(rf"(?:(?P<set>.+)_)?(?P<source>{pattern})", source)
        if match:
            shown = re.sub(pattern, title, match["source"])
            return f"{one_line(match['set'])}: {shown}" if match["set"] else shown
    return one_line(source)


@functools.cache
def _source_titles() -> list[tuple[str, str]]:
    domains = registry.domains().values()
    return [pair for domain in domains for pair in domain.source_titles.items()]


# -- token weights ---------------------------------------------------------------------------------


def weight_curve(groups: list[Group]) -> Figure:
    """w(p) with the dead zones shaded, above the histogram of p."""
    figure, (top, bottom) = drawing.subplots(2, height=3.5, sharex=True)
    probs = [i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
    log_probs = [math.log(p) if p else -math.inf for p in probs]
    known, largest = 0, 0.0
    for index, group in enumerate(groups):
        rule = weighting_of(group.runs[0]).rule
        color, name = drawing.color(index), drawn(group.name)
        if rule is None:
            label = f"{name}: no curve, see the table of runs"
            top.plot([], [], color=color, ls=drawing.style(index), label=label)
        else:
            known += 1
            weights = rule.weights(log_probs)
            top.plot(probs, weights, color=color, lw=1.9, ls=drawing.style(index), label=name)
            for dead in rule.dead_zones():
                assert dead.zone is not None  # the weight is a function of p
                (first, last), sign = dead.zone, ">" if dead.positive else "<"
                label = f"dead zone for A {sign} 0: {first:.3g} < p < {last:.3g}"
                top.axvspan(first, last, facecolor=color, alpha=0.13, lw=0, label=label)
                hatch = "//" if dead.positive else "\\\\"
                top.axvspan(first, last, facecolor="none", edgecolor=color, alpha=0.35, hatch=hatch)
        shares, source = probability_histogram(group, HISTOGRAM_BINS)
        if sum(shares):
            edges = [i / HISTOGRAM_BINS for i in range(HISTOGRAM_BINS + 1)]
            fill = len(groups) == 1
            bottom.stairs(
                shares, edges, color=color, fill=fill, alpha=0.75 if fill else 1.0,
                lw=1.6, ls=drawing.style(index), label=source if fill else name,
            )  # fmt: skip
            largest = max(largest, *shares)
    if not known and not largest:
        raise Missing("Neither the weighting nor any token probability is known.")
    top.set_ylabel("weight w")
    top.margins(y=0.2)
    bottom.set_ylabel("share of tokens")
    bottom.set_xlabel("token probability p")
    bottom.set_xlim(0, 1)
    if largest > 0.5:  # most tokens are near p = 1; the others must be seen too
        drawing.log_scale(bottom)
    drawing.legend(top)
    if len(groups) == 1:
        drawing.legend(bottom, least=1)
    return figure
