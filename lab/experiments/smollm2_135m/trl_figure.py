"""Draw trl.jsonl beside our own run of the same recipe (grpo.jsonl), and print both.

python -m lab.experiments.smollm2_135m.trl_figure
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sg_rlhf.common import figures

HERE = Path(__file__).parent
#: Our run of 20 rollouts in grpo.jsonl. The recipe with shared prompts had the same rewards.
OURS = "micro-batches of 64"
COLOURS = ("#404040", "#00798c")


def rows(file: str, run: str) -> dict[int, dict[str, Any]]:
    """Rollout -> its row. Rows of evaluations are left out."""
    found = map(json.loads, (HERE / file).read_text().splitlines())
    return {
        row["global_step"]: row
        for row in found
        if row["run"].startswith(run) and "rollout/accuracy" in row
    }


def main() -> None:
    """Both accuracies in one picture."""
    trl = rows("trl.jsonl", "TRL")
    ours = {step: row for step, row in rows("grpo.jsonl", OURS).items() if step in trl}
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axis = figure.subplots()
    for (name, found), colour in zip({"sg_rlhf": ours, "TRL": trl}.items(), COLOURS, strict=True):
        values = [row["rollout/accuracy"] for row in found.values()]
        axis.plot(list(found), values, "o-", color=colour, label=name, markersize=4)
        print(f"{name}: {values}, mean {statistics.mean(values):.3f}")
    axis.set_title("SmolLM2-135M, GRPO, the same prompts", fontsize=10)
    axis.set_xlabel("rollout")
    axis.set_ylabel("accuracy of the 64 responses")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    figures.save(figure, HERE / "trl.png", dpi=150)


if __name__ == "__main__":
    main()
