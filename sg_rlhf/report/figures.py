"""The figures of a training: from groups of runs to a chart.

:func:`lines` makes the plain ones; ``catalogue.py`` declares them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sg_rlhf.common.statistics import spikes
from sg_rlhf.report.chart import Chart, Missing, Panel, Series, Zone, look
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
from sg_rlhf.report.runs import Curve, Group, Run, RunError, curve, per_rollout
from sg_rlhf.report.samples import probability_histogram
from sg_rlhf.report.text import one_line
from sg_rlhf.report.weighting import weighting_of
from sg_rlhf.tasks import registry

CURVE_POINTS = 401
HISTOGRAM_BINS = 20


@dataclass(frozen=True)
class Line:
    """A panel with a line per group, over the rollouts.

    Attributes:
        key: of ``metrics.jsonl``; with ``steps`` of ``optimizer_steps.jsonl``, whose rows are
            averaged over each rollout.
        label: of the y axis.
        scale: of :class:`Panel`; ``log`` where all values are above 0, else ``zero``.
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

    def panel(self, groups: list[Group]) -> Panel:
        series = [
            self._series(group, index, window_of(groups)) for index, group in enumerate(groups)
        ]
        values = [y for found in series for y in found.values]
        zero_on = self.scale == "log" and (not values or min(values) <= 0)
        return Panel(self.label, series, scale="zero" if zero_on else self.scale)

    def _series(self, group: Group, index: int, window: int) -> Series:
        interval = None
        if self.band and len(group.runs) == 1:
            low, high = (dict(self.curve(group.runs[0], key)) for key in self.band)
            xs = sorted(low.keys() & high.keys())
            interval = ([(x, low[x]) for x in xs], [(x, high[x]) for x in xs])
        return Series(
            group.label,
            [points for run in group.runs if (points := self.curve(run))],
            window=window if self.smooth else 1,
            interval=interval,
            **look(index),
        )


REWARD = Line("rollout/reward_mean", "mean training reward")


def lines(*panels: Line, missing: str, needs: str = "") -> Callable[[list[Group]], Chart]:
    """A function that makes a chart of the panels below each other.

    Args:
        missing: the sentence for runs that do not log the first panel's value.
        needs: a key of ``metrics.jsonl`` that has to be above 0 in some row.
    """

    def chart(groups: list[Group]) -> Chart:
        rows = [row for group in groups for run in group.runs for row in run.metrics]
        if needs and not any(row.get(needs) for row in rows):
            raise Missing(missing)
        made = [line.panel(groups) for line in panels]
        if not any(series.curves for series in made[0].series):
            raise Missing(missing)
        return Chart(made)

    return chart


def window_of(groups: list[Group]) -> int:
    """How many rows a running mean takes: a fifth of the shortest run, 1 to 15."""
    shortest = min(len(run.metrics) for group in groups for run in group.runs)
    return max(1, min(15, shortest // 5))


def norm_curve(run: Run) -> Curve:
    """(optimizer step, gradient norm before clipping)."""
    return curve(run.steps, "actor_grad_norm", "optimizer_step")


def grad_norm(groups: list[Group]) -> Chart:
    """Gradient norm of every optimizer step before clipping, spikes marked (Figure 1)."""
    series, counts = [], []
    for index, group in enumerate(groups):
        curves = [points for run in group.runs if (points := norm_curve(run))]
        marks = [points[i] for points in curves for i in spikes([y for _, y in points])]
        counts.append(f"{len(marks)} spike{'s' * (len(marks) != 1)}")
        label = f"{group.label}: {counts[-1]}"
        series.append(Series(label, curves, marks=marks, **look(index)))
    norms = [y for found in series for y in found.values]
    if not norms:
        raise Missing("optimizer_steps.jsonl has no gradient norm.")
    spread = max(norms) > 10 * statistics.median(norms) and min(norms) > 0
    # The label of a single run is in no legend of a file.
    title = counts[0] if len(groups) == 1 else ""
    scale: Literal["log", "zero"] = "log" if spread else "zero"
    panel = Panel("L2 norm before clipping", series, "optimizer step", scale, title=title)
    return Chart([panel])


# -- accuracy --------------------------------------------------------------------------------------


def accuracy(groups: list[Group]) -> Chart:
    """Held-out accuracy with its 95 % interval, and accuracy on the training prompts."""
    labels = {held_out_label(run) for group in groups for run in group.runs}
    same = len(labels) == 1
    series = []
    for index, group in enumerate(groups):
        # What the held-out accuracy is of, where that is not the same everywhere.
        sets = "" if same else held_out_label(group.runs[0])
        name = f"{group.label}: {sets}" if sets else group.label
        series.append(_evaluated([held_out_accuracy(run) for run in group.runs], index, name))
        curves = [curve(run.metrics, "rollout/accuracy") for run in group.runs]
        label = f"{group.label}: training prompts" if len(groups) > 1 else "training prompts"
        curves = [points for points in curves if points]
        series.append(Series(label, curves, kind="thin", window=window_of(groups), **look(index)))
    series = [found for found in series if found.curves]
    if not series:
        raise Missing("There is neither a held-out evaluation nor accuracy on training prompts.")
    title = f"held out: {labels.pop()}" if same and any(labels) else ""
    return Chart([Panel("share correct", series, scale="zero", top=1.0, title=title)])


def reward_and_accuracy(groups: list[Group]) -> Chart:
    """Training reward above accuracy: the picture that a run ends with."""
    chart = lines(REWARD, missing="No rollout has a mean reward.")(groups)
    panels = [*chart.panels]
    with contextlib.suppress(Missing):
        panels += accuracy(groups).panels
    return replace(chart, panels=panels, size=(7.0, 5.4))


def _evaluated(runs: list[list[Evaluated]], index: int, label: str) -> Series:
    """Points of one group, with the interval of one run or the range of the seeds."""
    runs = [points for points in runs if points]
    interval = None
    if len(runs) == 1:
        known = [p for p in runs[0] if math.isfinite(p.half_width)]
        low = [(float(p.step), p.accuracy - p.half_width) for p in known]
        high = [(float(p.step), p.accuracy + p.half_width) for p in known]
        interval = (low, high)
    curves = [[(float(p.step), p.accuracy) for p in points] for points in runs]
    return Series(label, curves, kind="points", interval=interval, **look(index))


def accuracy_by_set(groups: list[Group]) -> Chart:
    """Accuracy on each set of ``sg.eval_sets`` and each data source along training."""
    runs = [run for group in groups for run in group.runs]
    sets = list(dict.fromkeys(name for run in runs for name in set_names(run)))
    found = sources(row for run in runs for row in run.evaluations)
    names = [name for name in sets if name in found] + [n for n in found if n not in sets]
    if not names:
        raise Missing("No evaluation names its sets or data sources.")
    panels = []
    for name in names:
        series = [
            _evaluated([sets_accuracy(run, [name]) for run in group.runs], index, group.label)
            for index, group in enumerate(groups)
        ]
        trained = {set_of(name, sets) in training_sets(run) for run in runs}
        some = "" if len(trained) == 1 else " of some runs"
        title = f"{source_name(name)}{f': training prompts{some}' if True in trained else ''}"
        panels.append(Panel("share correct", series, scale="zero", title=title))
    series = [found for panel in panels for found in panel.series]
    ends = [y for found in series if found.interval for _, y in found.interval[1]]
    top = min(1.0, 1.05 * max([y for found in series for y in found.values] + ends, default=1.0))
    return Chart([replace(panel, top=top) for panel in panels], columns=3)


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
    try:
        domains = registry.domains().values()
    except ValueError as error:
        raise RunError(str(error)) from None
    return [pair for domain in domains for pair in domain.source_titles.items()]


# -- token weights ---------------------------------------------------------------------------------


def weight_curve(groups: list[Group]) -> Chart:
    """w(p) with the dead zones shaded, above the histogram of p."""
    probs = [i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
    log_probs = [math.log(p) if p else -math.inf for p in probs]
    weights, shares, zones = [], [], []
    largest, title = 0.0, ""
    for index, group in enumerate(groups):
        rule = weighting_of(group.runs[0]).rule
        if rule is None:
            label = f"{group.name}: no curve, see the table of runs"
            weights.append(Series(label, [], **look(index)))
        else:
            curve_of_p = list(zip(probs, rule.weights(log_probs), strict=True))
            weights.append(Series(group.name, [curve_of_p], **look(index)))
            for dead in rule.dead_zones():
                assert dead.zone is not None  # the weight is a function of p
                (first, last), sign = dead.zone, ">" if dead.positive else "<"
                label = f"dead zone for A {sign} 0: {first:.3g} < p < {last:.3g}"
                zones.append(Zone(first, last, look(index)["colour"], label))
        histogram, source = probability_histogram(group, HISTOGRAM_BINS)
        if sum(histogram):
            middles = [(i + 0.5) / HISTOGRAM_BINS for i in range(HISTOGRAM_BINS)]
            bars = list(zip(middles, histogram, strict=True))
            shares.append(Series(group.name, [bars], kind="bars", **look(index)))
            largest = max(largest, *histogram)
            title = source if len(groups) == 1 else ""
    if not any(series.curves for series in weights) and not shares:
        raise Missing("Neither the weighting nor any token probability is known.")
    # Most tokens are near p = 1; the others must be seen too.
    scale: Literal["log", "zero"] = "log" if largest > 0.5 else "zero"
    x = "token probability p"
    above = Panel("weight w", weights, x, zones=zones)
    below = Panel("share of tokens", shares, x, scale, title=title)
    return Chart([above, below] if shares else [above])
