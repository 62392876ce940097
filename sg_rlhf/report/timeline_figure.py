"""The figure of when each process worked: the latest rollouts on one clock."""

from __future__ import annotations

import math
from typing import NamedTuple

from matplotlib.figure import Figure

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import GRID, MUTED, SERIES
from sg_rlhf.report.figures import Missing
from sg_rlhf.report.runs import Group, Row, number
from sg_rlhf.report.text import drawn
from sg_rlhf.run_dir.timing_keys import EXTRA, OTHER, PREFIX, TOTAL, exclusive_seconds

#: Rollouts of each configuration, and configurations.
LATEST, MOST_GROUPS = 6, 4
LANES = ("engines", "ranks", "controller")


class Phase(NamedTuple):
    """A phase of a rollout: who works, and in which sections of the timing."""

    title: str
    lanes: tuple[str, ...]
    names: tuple[str, ...]
    color: str


#: In the order of a rollout. What follows a rollout comes first: it is in the next one's row.
PHASES = (
    Phase("evaluation", ("engines",), ("evaluation",), SERIES[5]),
    Phase("checkpoint", ("ranks",), ("checkpoint",), SERIES[3]),
    Phase(
        "generation", ("engines",), ("engines_wake", "generation", "longest_response"), SERIES[0]
    ),
    Phase(
        "log-probs, values", ("ranks",),
        ("old_log_probs", "reference_log_probs", "reward_model", "values"), SERIES[4],
    ),
    Phase("experience, logging", ("controller",), ("make_experience", "hand_over"), MUTED),
    Phase(
        "update", ("ranks",),
        ("update_old_log_probs", "update_reference_log_probs", "update_forward",
         "update_backward", "ppo_train"), SERIES[1],
    ),
    Phase("weight sync", ("engines", "ranks"), ("broadcast", "sync_check"), SERIES[2]),
    Phase("experience, logging", ("controller",), ("logging", OTHER), MUTED),
)  # fmt: skip


def spans(rows: list[Row]) -> list[tuple[Phase, float, float]]:
    """(phase, start, seconds) of consecutive rollouts, from the first one's start.

    A row has the seconds of each section and the time at its end. The sections follow one another,
    in the order of :data:`PHASES`. Rows of earlier versions have no time: they follow at once.
    """
    found: list[tuple[Phase, float, float]] = []
    clock = 0.0
    origin = math.nan
    for row in rows:
        seconds = exclusive_seconds(row)
        if not seconds:
            continue
        for name in EXTRA:
            value = number(row, PREFIX + name)
            seconds[name] = value if math.isfinite(value) else 0.0
        if not found:
            seconds |= dict.fromkeys(EXTRA, 0.0)  # they belong to a rollout that is not shown
        length = number(row, PREFIX + TOTAL) + sum(seconds[name] for name in EXTRA)
        end = number(row, "time")
        if math.isfinite(end):
            origin = end - length if math.isnan(origin) else origin
            clock = max(clock, end - length - origin)
        for phase in PHASES:
            duration = sum(seconds.get(name, 0.0) for name in phase.names)
            if duration > 0:
                found.append((phase, clock, duration))
            clock += duration
    return found


def timeline(groups: list[Group]) -> Figure:
    """The latest rollouts of the first run of each configuration, a lane per kind of process."""
    shown = groups[:MOST_GROUPS]
    found = [spans(group.runs[0].metrics[-LATEST:]) for group in shown]
    if not any(found):
        raise Missing("The runs log no timings.")
    figure, panels = drawing.subplots(
        len(shown), 1, width=2 * drawing.WIDTH, height=0.7 + 1.05 * len(shown)
    )
    for axes, group, of_group in zip(panels, shown, found, strict=True):
        for phase, start, seconds in of_group:
            for lane in phase.lanes:
                axes.barh(
                    LANES.index(lane), seconds, 0.72, left=start, color=phase.color,
                    edgecolor=GRID, linewidth=0.4, label=phase.title,
                )  # fmt: skip
        axes.set_yticks(range(len(LANES)), LANES)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        if of_group:
            axes.set_xlim(0, max(start + seconds for _, start, seconds in of_group))
        steps = [int(row["global_step"]) for row in group.runs[0].metrics[-LATEST:]]
        if len(shown) > 1 or len(group.runs) > 1:
            title = f"{group.label}, rollouts {steps[0]} to {steps[-1]} of {group.runs[0].name}"
        else:
            title = f"rollouts {steps[0]} to {steps[-1]}"
        axes.set_title(drawn(title), loc="left", fontsize=8.5, color=MUTED)
    panels[-1].set_xlabel("seconds")
    drawing.legend_of_figure(panels)
    return figure
