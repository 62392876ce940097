"""The figure of an asynchronous run: how old its tokens were, and what was left out for its age."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from matplotlib.figure import Figure

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import ALARM, GRID, MUTED
from sg_rlhf.report.figures import Missing
from sg_rlhf.report.runs import Group, Row, number
from sg_rlhf.report.text import drawn
from sg_rlhf.report.timing_figures import merged
from sg_rlhf.run_dir.weight_versions import DROPPED_SHARE, SHARE_OF_AGE

DROPPED = "dropped"


def _shares(row: Row) -> dict[int | str, float]:
    """Age -> share of the tokens that were sampled for a rollout; those that were dropped too."""
    dropped = number(row, DROPPED_SHARE)
    ages = {
        int(key.removeprefix(SHARE_OF_AGE)): number(row, key)
        for key in row
        if key.startswith(SHARE_OF_AGE)
    }
    return {age: (1 - dropped) * share for age, share in ages.items()} | {DROPPED: dropped}


def staleness(groups: list[Group]) -> Figure:
    """Shares of each rollout's tokens by age in weight syncs, a panel for each configuration."""
    asynchronous = {}
    for group in groups:
        rows: dict[int, list[dict[int | str, float]]] = defaultdict(list)
        for row in (row for run in group.runs for row in run.metrics if DROPPED_SHARE in row):
            rows[int(row["global_step"])].append(_shares(row))
        if rows:
            asynchronous[group.label] = rows
    if not asynchronous:
        raise Missing("The runs are synchronous: every token was sampled by the current policy.")
    count = len(asynchronous)
    figure, panels = drawing.subplots(count, height=0.9 + 1.7 * count, sharex=True, sharey=True)
    for axes, (label, rows) in zip(panels, asynchronous.items(), strict=True):
        ages = sorted({age for found in rows.values() for row in found for age in row}, key=_order)
        by_step = {
            step: {str(age): statistics.fmean(row.get(age, 0.0) for row in found) for age in ages}
            for step, found in sorted(rows.items())
        }
        middles, means, each = merged(by_step)
        bottom = [0.0] * len(means)
        for age in ages:
            values = [row[str(age)] for row in means]
            if age == DROPPED and not any(values):
                continue
            axes.bar(middles, values, 0.86 * each, bottom=bottom, **_look(age))
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        axes.set_title(drawn(label), loc="left", fontsize=8.5, color=MUTED)
        axes.set_ylabel("share of tokens")
        axes.set_ylim(0, 1)
        axes.grid(visible=False, axis="x")
        drawing.whole_numbers(axes, f"rollout (mean of {each} each)" if each > 1 else "rollout")
    for axes in panels[:-1]:
        axes.set_xlabel("")
    drawing.legend_of_figure(panels)
    return figure


def _order(age: int | str) -> tuple[bool, int]:
    return (True, 0) if isinstance(age, str) else (False, age)


def _look(age: int | str) -> dict[str, Any]:
    if isinstance(age, str):
        return {"label": "dropped", "facecolor": ALARM, "hatch": "xxxx", "edgecolor": GRID}
    return {"label": f"age {age}", **drawing.fill(age)}
