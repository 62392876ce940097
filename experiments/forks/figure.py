"""The figure of the study: intervals of the contrasts, and the accuracy along training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.forks import analyse
from sg_rlhf.common import figures
from sg_rlhf.studies.plan import Cell, Study

COLOURS = {
    "grpo": "#404040",
    "sg_outside": "#d1495b",
    "sg_inside": "#00798c",
    "mask_only": "#edae49",
    "sg_outside_dose": "#8d3b72",
    "reshape_reversed": "#66a182",
}


def contrasts(
    study: Study, cells: Sequence[Cell], runs: analyse.Runs
) -> dict[str, tuple[str, analyse.Contrast]]:
    """Row's name -> (arm, end point minus GRPO's), from top to bottom; the interaction last."""
    found = {}
    for arm in study.file.variants:
        for corpus, title in analyse.CORPORA.items():
            sides = [analyse.values(cells, runs, corpus, side) for side in (arm, analyse.BASELINE)]
            if arm != analyse.BASELINE and len(analyse.differences(*sides)) >= 3:
                found[f"{title}: {arm}"] = (arm, analyse.contrast(*sides))
    pairs = [
        analyse.differences(
            *(
                analyse.values(cells, runs, corpus, arm)
                for arm in (analyse.TREATED, analyse.BASELINE)
            )
        )
        for corpus in ("d", "r")
    ]
    found["D minus R: sg_outside"] = (analyse.TREATED, analyse.contrast(*pairs))
    return found


def draw(study: Study, runs: Mapping[str, dict[str, Any]], to: Path) -> None:
    """Write the picture of the runs that are there."""
    cells = [*study.cells()]
    rows = contrasts(study, cells, runs)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    forest = axes[0]
    forest.axvspan(-analyse.MARGIN, analyse.MARGIN, color="#eeeeee", label="within ±.02")
    forest.axvline(0, color="#888888", linewidth=0.8)
    for y, (arm, found) in enumerate(rows.values()):
        sides = [[found.mean - found.low], [found.high - found.mean]]
        forest.errorbar(found.mean, y, xerr=sides, fmt="o", color=COLOURS[arm], capsize=3)
    forest.set_yticks(range(len(rows)), [f"{name} ({c.n})" for name, (_, c) in rows.items()])
    forest.invert_yaxis()
    forest.set_xlabel("held-out accuracy minus GRPO's, 95 % interval (pairs)")
    forest.legend(loc="best", fontsize=8)
    for axis, (corpus, title) in zip(axes[1:], analyse.CORPORA.items(), strict=True):
        for arm, colour in COLOURS.items():
            means = []
            for rollout in analyse.ROLLOUTS:
                at = analyse.values(cells, runs, corpus, arm, partial(analyse.at, rollout))
                means += [statistics.fmean(at.values())] if at else []
            if means:
                axis.plot(analyse.ROLLOUTS, means, "o-", color=colour, label=arm, markersize=3)
        axis.set_title(f"corpus {title}")
        axis.set_xlabel("rollouts")
        axis.set_ylabel("held-out accuracy")
        axis.legend(fontsize=8)
    figures.save(figure, to, dpi=150)
