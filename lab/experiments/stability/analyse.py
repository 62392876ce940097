"""The tables and the picture of the study, from the runs that are there.

    python -m lab.experiments.stability.analyse

Prints the verdict on the accuracy by the fixed rule (`lab.study.decision`), the collapses, and the
secondary figures of preregistration.md, unadjusted. Writes figure.png. Refuses if a fixed file has
changed.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy import stats

from lab.study import decision, paired
from lab.study.plan import Study, load_study
from lab.study.results import read_record
from sg_rlhf.common import figures
from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.config import ConfigError

HERE = Path(__file__).parent
TREATED, BASELINE = "sg_inside", "grpo"
COLOURS = {BASELINE: "#404040", TREATED: "#00798c", "grpo_own_rate": "#edae49"}
#: Rollouts of a mean of `largest_fall`.
SMOOTHED = 5

Run = dict[str, Any]
Runs = Mapping[str, Run]


def curve(run: Run) -> dict[int, float]:
    """Rollouts -> held-out accuracy; 0 is the start model."""
    return {row["rollout"]: row["held_out"] for row in run["curves"]["accuracy"]}


def collapsed(run: Run) -> bool:
    """Less accurate at the end than the start model, on the same problems."""
    found = curve(run)
    return found[max(found)] < found[0]


def largest_fall(run: Run) -> float:
    """The most by which a mean training reward of five rollouts is below an earlier one."""
    rewards = run["curves"]["reward"]
    means = [
        statistics.fmean(rewards[i : i + SMOOTHED]) for i in range(len(rewards) - SMOOTHED + 1)
    ]
    peak, fall = -math.inf, 0.0
    for mean in means:
        peak = max(peak, mean)
        fall = max(fall, peak - mean)
    return fall


SECONDARY: dict[str, Callable[[Run], float]] = {
    "accuracy after 10 rollouts": lambda run: curve(run)[10],
    "largest fall of the training reward": largest_fall,
    "mean training reward": lambda run: statistics.fmean(run["curves"]["reward"]),
    "entropy at the end": lambda run: run["figures"]["entropy_after"],
    "mean gradient norm": lambda run: run["figures"]["grad_norm_mean"],
    "largest gradient norm": lambda run: run["figures"]["grad_norm_max"],
}


def of_group(
    study: Study, runs: Runs, group: str, arm: str, measure: Callable[[Run], float]
) -> paired.Values:
    """A figure of the runs of a learning rate and arm, by start model and seed."""
    regimes = decision.decision_of(study).groups[group]
    return {
        (cell.regime, cell.seed): float(measure(runs[cell.name]))
        for cell in study.cells()
        if cell.variant == arm and cell.regime in regimes and cell.name in runs
    }


def collapses(study: Study, runs: Runs) -> list[str]:
    """Markdown: collapsed runs by learning rate, and in how many pairs one arm alone collapsed."""
    pairs: dict[str, list[tuple[bool, bool]]] = {}
    for group in decision.decision_of(study).groups:
        baseline, treated = (
            of_group(study, runs, group, arm, collapsed) for arm in (BASELINE, TREATED)
        )
        both = sorted(baseline.keys() & treated.keys())
        pairs[group] = [(bool(baseline[key]), bool(treated[key])) for key in both]
    pairs["all"] = [pair for group in pairs.values() for pair in group]
    alone = [f"{arm} alone" for arm in (BASELINE, TREATED)]
    lines = table_head(["learning rate", "pairs", BASELINE, TREATED, *alone, "p"])
    for name, found in pairs.items():
        counts = [sum(pair) for pair in zip(*found, strict=True)] or [0, 0]
        apart = [found.count((True, False)), found.count((False, True))]
        row = [len(found), *counts, *apart]
        lines.append(table_row([name, *map(str, row), f"{mcnemar(*apart):.3g}"]))
    return lines


def mcnemar(one: int, other: int) -> float:
    """p of the exact test, two-sided, of the pairs in which one alone collapsed (McNemar 1947)."""
    return float(stats.binomtest(one, one + other).pvalue) if one + other else 1.0


def secondary(study: Study, runs: Runs) -> list[str]:
    """Markdown: GRPO-SG minus GRPO by learning rate, paired, with 95 % intervals; unadjusted."""
    head = ["figure", "learning rate", "n", "GRPO", "GRPO-SG minus GRPO", "95 % interval"]
    lines = table_head(head)
    for title, measure in SECONDARY.items():
        for group in decision.decision_of(study).groups:
            arms = [of_group(study, runs, group, arm, measure) for arm in (TREATED, BASELINE)]
            if len(paired.differences(*arms)) > 1:
                found = paired.contrast(*arms)
                lines.append(
                    table_row([
                        title, group, str(found.n), f"{statistics.fmean(arms[1].values()):.3f}",
                        f"{found.mean:+.4f}", f"{found.low:+.4f} to {found.high:+.4f}",
                    ])
                )  # fmt: skip
    return lines


def draw(study: Study, runs: Runs, to: Path) -> None:
    """Held-out accuracy along training by learning rate: each run, and the mean of an arm."""
    groups = decision.decision_of(study).groups
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, len(groups), sharey=True)
    for axis, (group, regimes) in zip(axes, groups.items(), strict=True):
        for arm, colour in COLOURS.items():
            curves = [
                curve(runs[cell.name])
                for cell in study.cells()
                if cell.variant == arm and cell.regime in regimes and cell.name in runs
            ]
            for one in curves:
                axis.plot([*one], [*one.values()], color=colour, alpha=0.3, linewidth=0.8)
            if curves:
                means = [statistics.fmean(one[at] for one in curves) for at in curves[0]]
                axis.plot([*curves[0]], means, "o-", color=colour, label=f"{arm} ({len(curves)})")
        axis.set_title(f"{group} learning rate")
        axis.set_xlabel("rollouts")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("accuracy on 300 held-out prompts")
    figures.save(figure, to, dpi=150)


def main() -> int:
    """Exit status 0; 1 when refused."""
    study, runs = load_study(HERE / "study.yaml"), read_record(HERE)
    try:
        print("\n".join(["## Held-out accuracy", "", *decision.report(study, runs), ""]))
    except ConfigError as refusal:
        print(f"analyse: {refusal}", file=sys.stderr)
        return 1
    print("\n".join(["## Collapsed runs", "", *collapses(study, runs), ""]))
    print("\n".join(["## Secondary, unadjusted", "", *secondary(study, runs)]))
    draw(study, runs, HERE / "figure.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
