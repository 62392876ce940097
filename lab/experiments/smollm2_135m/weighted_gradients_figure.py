"""Draw weighted_gradients.json: the tokens' probabilities, and the cosines with GRPO's gradient.

python -m lab.experiments.smollm2_135m.weighted_gradients_figure
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from lab.experiments.forks.gate import VARIES
from lab.experiments.smollm2_135m.weighted_gradients import LOW, RESULT
from sg_rlhf.report import drawing

TO = Path("docs/images/real_model_weights.png")
#: Part of p: its middle on the axis, and its weight.
PARTS = {"low": (LOW / 2, "1"), "middle": ((LOW + VARIES) / 2, "1…1.4"), "high": (0.66, "1.4")}
NAMES = {
    "outside": "outside, 1 to 1.4", "outside_dose_3": "outside, 0.5 to 1.5",
    "inside": "inside, 1 to 1.4", "tr_grpo": "TR-GRPO", "mask_only": "mask only",
    "zero_low": "0 below p = .327",
}  # fmt: skip


def probabilities(axes: Axes, name: str, found: dict[str, Any]) -> None:
    """Shares of the tokens and of the gradient over p; above, what each weight applies to."""
    edges = np.linspace(0, 1, 21)
    axes.stairs(
        found["histogram_of_p"], edges, fill=True, color=drawing.color(0), alpha=0.45,
        label="share of tokens",
    )  # fmt: skip
    axes.stairs(
        found["histogram_of_gradient"], edges, color=drawing.color(1), lw=1.8,
        label="share of |A| (1 - p)",
    )  # fmt: skip
    top = 1.3 * max(*found["histogram_of_p"], *found["histogram_of_gradient"])
    for part, (middle, weight) in PARTS.items():
        text = f"w {weight}\n{found['share_of_gradient'][part]:.0%}"
        axes.text(middle, 0.99 * top, text, ha="center", va="top", fontsize=7.5)
    for border in (LOW, VARIES):
        axes.axvline(border, color=drawing.MUTED, lw=0.8, ls=(0, (4, 2)))
    axes.set_ylim(0, top)
    axes.set_xlim(0, 1)
    axes.set_title(f"{name}, {found['accuracy']:.0%} right", loc="left", fontsize=9)
    axes.set_xlabel("token probability p")


def cosines(axes: Axes, sets: dict[str, Any]) -> None:
    """The cosine of each algorithm over all prompts, and the interval over batches."""
    for index, (name, found) in enumerate(sets.items()):
        for place, algorithm in enumerate(NAMES):
            cosine = found["algorithms"][algorithm]["cosine"]
            y, label = place + 0.3 * index - 0.15, name if place == 0 else None
            axes.plot(cosine["ci95"], (y, y), color=drawing.color(index), lw=1.4)
            axes.plot(cosine["all"], y, "os"[index], ms=5, color=drawing.color(index), label=label)
    axes.set_yticks(range(len(NAMES)), NAMES.values())
    axes.invert_yaxis()
    axes.set_xlim(right=1.01)
    axes.set_title("first update", loc="left", fontsize=9)
    axes.set_xlabel("cosine with GRPO's gradient")
    axes.legend(loc="center left")


def main() -> None:
    """Write the picture."""
    sets = json.loads(RESULT.read_text())["sets"]
    with matplotlib.rc_context(drawing.RC):
        figure, axes = drawing.subplots(1, 1 + len(sets), (11, 3.1))
        for panel, (name, found) in zip(axes, sets.items(), strict=False):
            probabilities(panel, name, found)
        axes[0].legend(loc="center")
        cosines(axes[-1], sets)
        drawing.save(figure, TO)


if __name__ == "__main__":
    main()
