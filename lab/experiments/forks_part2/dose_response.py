"""How far GRPO-SG outside the clip turns the update, by the ratio of its largest and least weight.

    python -m lab.experiments.forks_part2.dose_response r0 d0

No training: cosines with GRPO's gradient and AdamW step on start models. The weight is the
published sigmoid stretched from L = 1 to U, without a clip:

    w = 1 + (U - 1) (2 sigmoid(9 p) - 1)

For U = 3 it is twice the arm `sg_outside_dose`. Writes dose_response.json and dose_response.png.
The picture also has arms of gradients.json, and the least cosine that a ratio allows if the
gradients of tokens are orthogonal (Kantorovich): 2 sqrt(U) / (1 + U).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.experiments.forks.start_gradients import Arms
from lab.experiments.forks_part2 import gradients
from sg_rlhf.common import figures
from sg_rlhf.common.atomic_io import write_whole

OUT = gradients.HERE / "dose_response.json"
RATIOS = (1.2, 1.4, 2.0, 2.5, 3.0, 4.0, 5.0)
#: Algorithms of the field next to the curve. STARE acts on R0 and D0 if its gate is open.
RIVALS: Arms = {
    "ar": ("ar", {}),
    "stare": ("stare", {"target_entropy": 100.0}),
    "stare_c2": ("stare", {"target_entropy": 100.0, "lowered": 0.9}),
    "top_entropy": ("top_entropy", {}),
}
COLOURS = {"r0": "#d1495b", "d0": "#00798c"}
LEVELS = {"sg_inside": ":", "zero_low": "-."}


def stretched(ratio: float) -> dict[str, Any]:
    """Parameters of ``grpo_sg`` for the weight of the module's formula."""
    alpha = 2 * (ratio - 1)
    return {"alpha": alpha, "mu": 0.5 - 1 / alpha, "lower": 1.0, "upper": ratio}


def arm(ratio: float) -> str:
    return f"outside_{ratio:g}"


ARMS: Arms = {
    "grpo": ("grpo", {}),
    **{arm(ratio): ("grpo_sg_outside", stretched(ratio)) for ratio in RATIOS},
    **RIVALS,
}


def least_cosine(ratio: float) -> float:
    """Of a weighted and the plain sum of orthogonal vectors, for weights of this ratio."""
    return 2 * math.sqrt(ratio) / (1 + ratio)


def draw(found: dict[str, Any], arms: dict[str, Any], to: Path) -> None:
    """Step cosine by ratio: a line per start model, dotted levels of other arms, the bound."""
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axis = figure.subplots()
    fine = [1 + i / 50 for i in range(201)]
    axis.plot(fine, [*map(least_cosine, fine)], "--", color="#888888", label="orthogonal bound")
    for name, rows in found.items():
        points = [1.0, *(rows[arm(ratio)]["step_cosine"] for ratio in RATIOS)]
        title = f"{name.upper()}: AdamW's step"
        axis.plot([1, *RATIOS], points, "o-", color=COLOURS[name], markersize=4, label=title)
        for level, style in LEVELS.items():
            if name in arms:
                y = arms[name][level]["step_cosine"]
                axis.axhline(y, color=COLOURS[name], linestyle=style, linewidth=1,
                             label=f"{name.upper()}: {level}")  # fmt: skip
    axis.axvline(1.4, color="#cccccc", linewidth=1)
    axis.set_xlabel("U / L, weight outside the clip (published: 1.4)")
    axis.set_ylabel("cosine with GRPO's step")
    axis.legend(fontsize=8)
    figures.save(figure, to, dpi=150)


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    names = [*found]
    head = [f"{name.upper()}: {kind}" for name in names for kind in ("gradient", "AdamW's step")]
    lines = [f"| arm | bound | {' | '.join(head)} |", "|---|--:|" + "--:|" * len(head)]
    ratios = {arm(ratio): ratio for ratio in RATIOS}
    for one in [*ARMS][1:]:
        bound = f"{least_cosine(ratios[one]):.3f}" if one in ratios else ""
        cosines = [
            f"{found[name][one][key]:.3f}" for name in names for key in ("cosine", "step_cosine")
        ]
        lines.append(f"| `{one}` | {bound} | {' | '.join(cosines)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("starts", nargs="*", help="start models to measure anew, such as r0 and d0")
    args = parser.parse_args(argv)
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in args.starts:
        found[name] = gradients.figures_of(name, ARMS)
        write_whole(OUT, json.dumps(found, indent=1) + "\n")
    draw(found, json.loads(gradients.OUT.read_text()), OUT.with_suffix(".png"))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
