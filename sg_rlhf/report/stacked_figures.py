"""The figures of each rollout's parts, stacked: its seconds, and the age of its tokens."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import ALARM, GRID, MUTED, SERIES, Missing
from sg_rlhf.report.runs import Group, Row, number
from sg_rlhf.report.text import drawn
from sg_rlhf.run_dir.timing_keys import OTHER, exclusive_seconds
from sg_rlhf.run_dir.weight_versions import DROPPED_SHARE, SHARE_OF_AGE

#: Part of a rollout's time -> the sections of it and how it is drawn.
_HATCHED = {"hatch": "////", "edgecolor": GRID}
PARTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "generation": (("generation",), {"color": SERIES[0]}),
    "longest response": (("longest_response",), {"facecolor": SERIES[0], **_HATCHED}),
    "engines wake, sleep": (("engines_wake",), {"color": SERIES[5]}),
    "old log-probs": (("old_log_probs", "update_old_log_probs"), {"color": SERIES[4]}),
    "reference, reward model, values": (
        ("reference_log_probs", "update_reference_log_probs", "reward_model", "values",
         "make_experience"), {"facecolor": SERIES[4], **_HATCHED},
    ),
    "forward": (("update_forward",), {"color": SERIES[1]}),
    "backward, optimizer": (("update_backward",), {"facecolor": SERIES[1], **_HATCHED}),
    "rest of the update": (("hand_over", "ppo_train"), {"color": SERIES[3]}),
    "weight sync": (("broadcast", "sync_check"), {"color": SERIES[2]}),
    "other": (("logging", OTHER), {"color": MUTED}),
}  # fmt: skip


def seconds_per_rollout(groups: list[Group]) -> Figure:
    """Seconds of each rollout, stacked by part; a panel for each configuration."""

    def parts(row: Row) -> dict[str, float]:
        seconds = exclusive_seconds(row)
        if not seconds:
            return {}
        return {part: sum(seconds[name] for name in names) for part, (names, _) in PARTS.items()}

    looks = {part: look for part, (_, look) in PARTS.items()}
    by_group = [_mean_of_seeds(group, parts) for group in groups]
    if not any(by_group):
        raise Missing("The runs log no timings.")
    figure, panels = _stacked(groups, by_group, looks, "seconds")
    # The first rollout, in which things are compiled, may not flatten the others. It is cut, and
    # its seconds are written above it.
    totals = [[sum(values.values()) for values in steps.values()] for steps in by_group]
    top = 1.1 * max(max(found[1:] or found) for found in totals if found)
    panels[0].set_ylim(0, top)
    for axes, steps, found in zip(panels, by_group, totals, strict=False):
        if found and found[0] > top:
            axes.annotate(
                f"cut: {found[0]:.3g} s", (min(steps) - 0.5, 1.0), (0, 2), va="bottom",
                textcoords="offset points", xycoords=axes.get_xaxis_transform(),
                fontsize=7.5, color=ALARM,
            )  # fmt: skip
    return figure


def staleness(groups: list[Group]) -> Figure:
    """Shares of each rollout's tokens by age in weight syncs, a panel for each configuration."""

    def shares(row: Row) -> dict[str, float]:
        if DROPPED_SHARE not in row:
            return {}
        dropped = number(row, DROPPED_SHARE)
        ages = [key for key in row if key.startswith(SHARE_OF_AGE)]
        found = {
            f"age {k.removeprefix(SHARE_OF_AGE)}": (1 - dropped) * number(row, k) for k in ages
        }
        return found | {"dropped": dropped}

    by_group = [_mean_of_seeds(group, shares) for group in groups]
    shown = [i for i, found in enumerate(by_group) if found]
    if not shown:
        raise Missing("The runs are synchronous: every token was sampled by the current policy.")
    by_group = [by_group[i] for i in shown]
    ages = {name for steps in by_group for values in steps.values() for name in values}
    ordered = sorted(ages - {"dropped"}, key=lambda name: int(name.split()[1]))
    looks: dict[str, dict[str, Any]] = {
        name: {"color": drawing.color(i)} for i, name in enumerate(ordered)
    }
    looks["dropped"] = {"facecolor": ALARM, **_HATCHED}
    figure, panels = _stacked([groups[i] for i in shown], by_group, looks, "share of tokens")
    panels[0].set_ylim(0, 1)
    return figure


def _mean_of_seeds(
    group: Group, of_row: Callable[[Row], dict[str, float]]
) -> dict[int, dict[str, float]]:
    """Rollout -> the named values of its rows, the mean over the seeds that have it."""
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for row in (row for run in group.runs for row in run.metrics):
        if values := of_row(row):
            found[int(row["global_step"])].append(values)
    return {
        step: {
            name: statistics.fmean(values.get(name, 0.0) for values in rows)
            for name in dict.fromkeys(name for values in rows for name in values)
        }
        for step, rows in sorted(found.items())
    }


def _stacked(
    groups: Sequence[Group],
    by_group: Sequence[dict[int, dict[str, float]]],
    looks: Mapping[str, dict[str, Any]],
    label: str,
) -> tuple[Figure, list[Axes]]:
    """A panel per group with its values of each rollout, stacked in the order of ``looks``."""
    figure, panels = drawing.wide_panels(len(groups), label)
    for axes, group, steps in zip(panels, groups, by_group, strict=False):
        if len(groups) > 1:
            axes.set_title(drawn(group.label), loc="right", fontsize=8.5, color=MUTED)
        drawing.whole_numbers(axes)
        edges = [*(step - 0.5 for step in steps), max(steps, default=0) + 0.5]
        below = [0.0] * len(steps)
        for name, look in looks.items():
            values = [found.get(name, 0.0) for found in steps.values()]
            if any(values):
                above = [a + b for a, b in zip(below, values, strict=True)]
                axes.stairs(above, edges, baseline=below, fill=True, label=name, lw=0.4, **look)
                below = above
    drawing.legend_of_figure(panels, least=1)
    return figure, panels
