"""The figure of time: seconds of each rollout by part, and what to change."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import GRID, INK, MUTED, SERIES
from sg_rlhf.report.figures import Missing
from sg_rlhf.report.runs import Group, number
from sg_rlhf.report.text import drawn
from sg_rlhf.report.time_advice import advice
from sg_rlhf.run_dir.timing_keys import OTHER, PREFIX, TOTAL, exclusive_seconds

#: More bars than this would be lines: neighbours are drawn as their mean.
BARS = 60
#: A part below this share of what is drawn has no bar of its own.
SMALL = 0.01
COLUMNS = 3


class Shown(NamedTuple):
    """A part as it is drawn: one colour for each phase, a filling for what is within it."""

    title: str
    names: tuple[str, ...]
    color: str
    hatch: str = ""

    @property
    def look(self) -> dict[str, Any]:
        return {"facecolor": self.color, "hatch": self.hatch, "edgecolor": GRID, "linewidth": 0.4}


SHOWN = (
    Shown("generation", ("generation",), SERIES[0]),
    Shown("longest response", ("longest_response",), SERIES[0], "////"),
    Shown("engines wake, sleep", ("engines_wake",), SERIES[0], "...."),
    Shown("old log-probs", ("old_log_probs", "update_old_log_probs"), SERIES[4], "////"),
    Shown("reference log-probs", ("reference_log_probs", "update_reference_log_probs"), SERIES[4]),
    Shown("reward model, values", ("reward_model", "values"), SERIES[4], "xxxx"),
    Shown("advantages", ("make_experience",), SERIES[4], "...."),
    Shown("sending samples to the ranks", ("hand_over",), SERIES[3]),
    Shown("forward", ("update_forward",), SERIES[1]),
    Shown("backward, optimizer", ("update_backward",), SERIES[1], "////"),
    Shown("rest of the update", ("ppo_train",), SERIES[1], "...."),
    Shown("weight sync", ("broadcast",), SERIES[2]),
    Shown("its check", ("sync_check",), SERIES[2], "////"),
    Shown("logging", ("logging",), SERIES[5]),
    Shown("other", (OTHER,), MUTED),
)
_REST = Shown("less than 1 % each", (), MUTED, "////")


def of_rollouts(group: Group) -> dict[int, dict[str, float]]:
    """Seconds by part of each rollout, the mean over the seeds that have it."""
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for run in group.runs:
        for row in run.metrics:
            if parts := exclusive_seconds(row):
                found[int(row["global_step"])].append(parts)
    return {
        step: {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
        for step, rows in sorted(found.items())
    }


def _large_parts(of_groups: list[list[dict[str, float]]]) -> list[Shown]:
    """Those with a bar of their own: :data:`SMALL` or more of what some group's bars are."""

    def large(shown: Shown, seconds: list[dict[str, float]]) -> bool:
        own = sum(row[name] for row in seconds for name in shown.names)
        return 0 < own >= SMALL * sum(sum(row.values()) for row in seconds)

    return [shown for shown in SHOWN if any(large(shown, seconds) for seconds in of_groups)]


def _drawn_parts(
    seconds: list[dict[str, float]], large: list[Shown]
) -> list[tuple[Shown, list[float]]]:
    """What is drawn of each bar, from below; what is not ``large`` together at the end."""
    parts = [(shown, [sum(row[n] for n in shown.names) for row in seconds]) for shown in SHOWN]
    drawn_alone = [(shown, values) for shown, values in parts if shown in large]
    small = [values for shown, values in parts if shown not in large]
    rest = [sum(column) for column in zip(*small, strict=True)]
    return [*drawn_alone, (_REST, rest)] if any(rest) else drawn_alone


def seconds_per_rollout(groups: list[Group]) -> Figure:
    """A bar per rollout, stacked by part; a panel for each configuration."""
    columns = min(COLUMNS, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure, panels = drawing.subplots(
        rows, columns, width=2 * drawing.WIDTH, height=0.6 + 2.3 * rows, sharey=True
    )
    bars = [merged(of_rollouts(group)) for group in groups]
    large = _large_parts([seconds for _, seconds, _ in bars])
    tops = [
        _bars(axes, group, *of_group, large)
        for axes, group, of_group in zip(panels, groups, bars, strict=False)
    ]
    if not any(tops):
        raise Missing("The runs log no timings.")
    _leave_out_the_first(panels, tops)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("seconds")
    drawing.legend_of_figure(panels)
    return figure


def merged(
    by_step: dict[int, dict[str, float]],
) -> tuple[list[float], list[dict[str, float]], int]:
    """The bars of a panel: where they are, their values by part, and of how many rollouts each.

    Args:
        by_step: rollout -> values by part, of the same parts each.
    """
    each = max(1, math.ceil(len(by_step) / BARS))
    steps, values = list(by_step), list(by_step.values())
    chunks = [slice(i, i + each) for i in range(0, len(steps), each)]
    means = [
        {name: statistics.fmean(row[name] for row in values[chunk]) for name in values[0]}
        for chunk in chunks
    ]
    return [statistics.fmean(steps[chunk]) for chunk in chunks], means, each


def _bars(
    axes: Axes,
    group: Group,
    middles: list[float],
    means: list[dict[str, float]],
    merged: int,
    large: list[Shown],
) -> list[float]:
    """One group's panel; the height of each bar."""
    axes.set_title(drawn(group.label), loc="left", fontsize=8.5, color=MUTED)
    tops = [0.0] * len(means)
    if not means:
        return tops
    for shown, values in _drawn_parts(means, large):
        axes.bar(middles, values, 0.86 * merged, bottom=tops, label=shown.title, **shown.look)
        tops = [a + b for a, b in zip(tops, values, strict=True)]
    axes.grid(visible=False, axis="x")
    drawing.whole_numbers(axes, f"rollout (mean of {merged} each)" if merged > 1 else "rollout")
    return tops


def _leave_out_the_first(panels: list[Axes], tops: list[list[float]]) -> None:
    """The first rollout, in which things are compiled, may not flatten the others: it is cut."""
    highest = 1.1 * max(max(of_group[1:] or of_group) for of_group in tops if of_group)
    panels[0].set_ylim(0, highest)  # of all of them
    for axes, of_group in zip(panels, tops, strict=False):
        if of_group and of_group[0] > highest:
            axes.annotate(
                f"{of_group[0]:.0f} s", (0, 1), xycoords="axes fraction", ha="left", va="bottom",
                fontsize=8, color=INK,
            )  # fmt: skip


def _medians(group: Group) -> dict[str, float]:
    """The median of each part, without the first rollout; ``other`` is the rest of the whole."""
    rows = [row for run in group.runs for row in (run.metrics[1:] or run.metrics)]
    found = [parts for row in rows if (parts := exclusive_seconds(row))]
    names = found[0] if found else [name for shown in SHOWN for name in shown.names]
    medians = {name: statistics.median([row[name] for row in found] or [0.0]) for name in names}
    totals = [v for row in rows if math.isfinite(v := number(row, PREFIX + TOTAL))]
    total = statistics.median(totals) if totals else 0.0
    named = sum(seconds for name, seconds in medians.items() if name != OTHER)
    return {**medians, OTHER: max(0.0, total - named)}


def what_to_change(groups: list[Group]) -> list[str]:
    """A sentence for each configuration: what takes most of a rollout, and what to change."""
    found = []
    for group in groups:
        run = group.runs[0]
        text = advice(_medians(group), run.setting if run.config else lambda _key: None)
        if text:
            found.append(f"{group.label}: {text}" if len(groups) > 1 else text)
    return found
