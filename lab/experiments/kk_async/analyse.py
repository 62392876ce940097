"""The table of README.md, from the committed runs of the study of the bound.

    python lab/experiments/kk_async/analyse.py

Means over seeds with half of their 95 % t-interval; differences are paired by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.study.plan import load_study
from lab.study.results import interval, read_record

HERE = Path(__file__).parent


def _shown(values: Sequence[float], sign: str = "") -> str:
    mean, half = statistics.fmean(values), interval(values)
    text = f"{mean:{sign}.3f}"
    return f"{text.replace('0.', '.', 1)} +- {half:.3f}".replace("+- 0.", "+- .")


def _halfway(cell: dict[str, Any]) -> float:
    (found,) = [row["held_out"] for row in cell["curves"]["accuracy"] if row["rollout"] == 10]
    return float(found)


def _at_the_end(cell: dict[str, Any]) -> float:
    return float(cell["figures"]["held_out_after"])


def _name(regime: str) -> str:
    algorithm, high = regime.removesuffix("_high_lr"), regime.endswith("_high_lr")
    return f"{algorithm.upper().replace('_', '-')}, {'5e-4' if high else '2e-4'}"


def table() -> list[str]:
    """Markdown: a row for each algorithm, learning rate and bound."""
    study, runs = load_study(HERE / "study.yaml"), read_record(HERE)
    rows: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for cell in study.cells():
        if cell.name in runs:
            found = (cell.seed, runs[cell.name])
            rows.setdefault((cell.regime, cell.variant), []).append(found)
    lines = [
        "| | bound | after 10 rollouts | minus bound 0 | after 20 | minus bound 0 |",
        "|---|--:|---|---|---|---|",
    ]
    for (regime, variant), cells in rows.items():
        of_bound_0 = dict(rows[regime, study.file.baseline])
        columns = [_name(regime), variant.removeprefix("bound_")]
        for accuracy in (_halfway, _at_the_end):
            values = {seed: accuracy(cell) for seed, cell in cells}
            pairs = [value - accuracy(of_bound_0[seed]) for seed, value in values.items()]
            is_baseline = variant == study.file.baseline
            columns += [_shown([*values.values()]), "" if is_baseline else _shown(pairs, "+")]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
