"""The figure of the study: intervals of the contrasts, and the accuracy along training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from sg_rlhf.common import figures

if TYPE_CHECKING:
    from lab.study.paired import Contrast

COLOURS = {
    "grpo": "#404040",
    "sg_outside": "#d1495b",
    "sg_inside": "#00798c",
    "mask_only": "#edae49",
    "zero_low": "#3d5a80",
    "sg_outside_dose": "#8d3b72",
    "reshape_reversed": "#66a182",
}


def draw(
    contrasts: Mapping[str, tuple[str, Contrast]],
    accuracy: Mapping[str, Mapping[str, Mapping[int, float]]],
    margin: float,
    to: Path,
) -> None:
    """Write the picture.

    Args:
        contrasts: row -> (arm, its end point minus GRPO's).
        accuracy: title of a corpus -> arm -> rollout -> mean held-out accuracy.
        margin: of the test for equivalence.
        to: the file.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    forest, *axes = figure.subplots(1, 1 + len(accuracy), width_ratios=[1.5] + [1] * len(accuracy))
    label = f"within ±{margin:.2f}".replace("0.", ".")
    forest.axvspan(-margin, margin, color="#eeeeee", label=label)
    forest.axvline(0, color="#888888", linewidth=0.8)
    for y, (arm, found) in enumerate(contrasts.values()):
        sides = [[found.mean - found.low], [found.high - found.mean]]
        forest.errorbar(found.mean, y, xerr=sides, fmt="o", color=COLOURS[arm], capsize=3)
    rows = [f"{name} ({found.n})" for name, (_, found) in contrasts.items()]
    forest.set_yticks(range(len(rows)), rows)
    forest.invert_yaxis()
    forest.set_xlabel("held-out accuracy minus GRPO's, 95 % interval (pairs)")
    forest.legend(loc="best", fontsize=8)
    for axis, (title, arms) in zip(axes, accuracy.items(), strict=True):
        for arm, curve in arms.items():
            rollouts, means = zip(*curve.items(), strict=True)
            axis.plot(rollouts, means, "o-", color=COLOURS[arm], label=arm, markersize=3)
        axis.set_title(f"corpus {title}")
        axis.set_xlabel("rollouts")
        axis.set_ylabel("held-out accuracy")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=len(labels), fontsize=8)
    figures.save(figure, to, dpi=150)
