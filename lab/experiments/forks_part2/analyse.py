"""The tables and the picture of the study, from the runs that are there.

    python -m lab.experiments.forks_part2.analyse

Prints the verdict by the fixed rule (`lab.study.decision`), then the secondary end points of
preregistration.md, unadjusted. Writes figure.png. Refuses if a fixed file has changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lab.experiments.forks import analyse as first
from lab.experiments.forks import figure
from lab.study import decision
from lab.study.plan import Study, load_study
from lab.study.results import read_record
from sg_rlhf.config import ConfigError

HERE = Path(__file__).parent
#: Of the first study, and the mean gradient norm.
SECONDARY = {
    **first.SECONDARY,
    "log of mean gradient norm": first.AFTERWARDS["mean gradient norm"],
}


def secondary(study: Study, runs: first.Runs) -> list[str]:
    """Markdown: every arm minus GRPO, and mask_only minus Eq. 13; paired, unadjusted."""
    return first.secondary(study, runs, SECONDARY)


def draw(study: Study, runs: first.Runs, to: Path) -> None:
    """Each arm minus GRPO on the end point, and the accuracy along training."""
    cells = [*study.cells()]
    against = [(arm, first.BASELINE) for arm in study.file.variants if arm != first.BASELINE]
    rows = {
        f"{first.CORPORA[corpus]}: {arm}": (arm, found)
        for (corpus, arm, _), found in first.compared(cells, runs, first.end_point, against).items()
    }
    margin = decision.decision_of(study).margin
    figure.draw(rows, first.accuracy(study, runs), margin, to)


def main() -> int:
    """Exit status 0; 1 when refused."""
    study, runs = load_study(HERE / "study.yaml"), read_record(HERE)
    try:
        print("\n".join(["## Primary", "", *decision.report(study, runs), ""]))
    except ConfigError as refusal:
        print(f"analyse: {refusal}", file=sys.stderr)
        return 1
    print("\n".join(["## Secondary, unadjusted", "", *secondary(study, runs)]))
    draw(study, runs, HERE / "figure.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
