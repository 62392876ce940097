"""The tables and the picture of the study, from the runs that are there.

    python -m lab.experiments.few_prompts.analyse

Prints the verdict of both primary end points by the fixed rule (`lab.study.decision`), then the
secondary figures of preregistration.md, unadjusted. Writes figure.png. Refuses if a fixed file has
changed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.study import decision, paired
from lab.study.plan import Study, load_study
from lab.study.results import read_record
from sg_rlhf.common import figures
from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.config import ConfigError

HERE = Path(__file__).parent
GAP = "held_out_minus_trained"
END_POINTS = {GAP: "Held-out minus trained accuracy", "held_out": "Held-out accuracy"}
COLOURS = {"grpo": "#404040", "sg_inside": "#00798c", "grpo_320_prompts": "#edae49"}
Runs = Mapping[str, dict[str, Any]]


def with_gap(runs: Runs) -> Runs:
    """The runs, each evaluation with the difference of its two sets."""
    found = {}
    for name, run in runs.items():
        rows = [{**row, GAP: row["held_out"] - row["trained"]} for row in curve(run)]
        found[name] = {**run, "curves": {**run["curves"], "accuracy": rows}}
    return found


def curve(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    rows: list[dict[str, Any]] = run["curves"]["accuracy"]
    return rows


def on(study: Study, point: str) -> Study:
    """The study with another accuracy as its end point."""
    rule = decision.decision_of(study)
    chosen = rule.end_point.model_copy(update={"set": point})
    update = {"decision": rule.model_copy(update={"end_point": chosen})}
    return replace(study, file=study.file.model_copy(update=update))


def secondary(study: Study, runs: Runs) -> list[str]:
    """Markdown: GRPO-SG minus GRPO, paired, with 95 % intervals; unadjusted."""
    lines = table_head(["figure", "n", "GRPO", "GRPO-SG minus GRPO", "95 % interval"])
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "accuracy on the trained prompts": lambda run: curve(run)[-1]["trained"],
        "mean training reward": lambda run: statistics.fmean(run["curves"]["reward"]),
        "entropy at the end": lambda run: run["figures"]["entropy_after"],
        "mean gradient norm": lambda run: run["figures"]["grad_norm_mean"],
    }
    for title, measure in measures.items():
        arms = [
            {
                (cell.regime, cell.seed): float(measure(runs[cell.name]))
                for cell in study.cells()
                if cell.variant == arm and cell.name in runs
            }
            for arm in ("sg_inside", "grpo")
        ]
        if len(paired.differences(*arms)) > 1:
            found = paired.contrast(*arms)
            lines.append(
                table_row([
                    title, str(found.n), f"{statistics.fmean(arms[1].values()):.3f}",
                    f"{found.mean:+.4f}", f"{found.low:+.4f} to {found.high:+.4f}",
                ])
            )  # fmt: skip
    return lines


def draw(study: Study, runs: Runs, to: Path) -> None:
    """Accuracy of each run on trained prompts and on held-out ones; crosses are means."""
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axis = figure.subplots()
    for arm, colour in COLOURS.items():
        ends = [
            (curve(run)[-1]["trained"], curve(run)[-1]["held_out"])
            for cell in study.cells()
            if cell.variant == arm and (run := runs.get(cell.name))
        ]
        if ends:
            x, y = zip(*ends, strict=True)
            axis.plot(x, y, "o", color=colour, alpha=0.35, markersize=4)
            mean = (statistics.fmean(x), statistics.fmean(y))
            axis.plot(*mean, "P", color=colour, markersize=11, markeredgecolor="w", label=arm)
    axis.axline((0.5, 0.5), slope=1, color="#aaaaaa", linewidth=0.8)
    axis.set_xlabel("accuracy on the 32 prompts")
    axis.set_ylabel("accuracy on 300 held-out prompts")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figures.save(figure, to, dpi=150)


def main() -> int:
    """Exit status 0; 1 when refused."""
    study, runs = load_study(HERE / "study.yaml"), with_gap(read_record(HERE))
    try:
        for point, title in END_POINTS.items():
            print("\n".join([f"## {title}", "", *decision.report(on(study, point), runs), ""]))
    except ConfigError as refusal:
        print(f"analyse: {refusal}", file=sys.stderr)
        return 1
    print("\n".join(["## Secondary, unadjusted", "", *secondary(study, runs)]))
    draw(study, runs, HERE / "figure.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
