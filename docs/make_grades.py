"""Write the tables of docs/evaluation.md on the grader of mathematics, from the results.

    python docs/make_grades.py [--check]

``--check`` writes nothing and fails if the page would change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_tables import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evaluation.md"
RESULTS = ROOT / "experiments" / "graders" / "results"


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return result


#: Titles of suites whose names in the result say little to a reader.
TITLES = {
    "golds written otherwise": "reference answers, written differently",
    "golds with one certified change": "reference answers with one change",
    "changes of every gold": "every reference answer, rewritten and altered",
}


def suites() -> list[str]:
    """The sum of both errors, and a row for each suite."""
    found = _result("grading_suites.json")["suites"]
    right, wrong = (sum(row[kind] for row in found.values()) for kind in ("right", "wrong"))
    accepted, rejected = (
        sum(row["after"][kind] for row in found.values())
        for kind in ("false_positives", "false_negatives")
    )
    lines = [
        f"Of {right:,} right answers it rejects {rejected}, of {wrong:,} wrong answers it accepts "
        f"{accepted}.",
        "",
        "| suite | right answers | rejected | wrong answers | accepted |",
        "|---|---|---|---|---|",
    ]
    for name, row in found.items():
        errors = row["after"]
        lines.append(
            f"| {TITLES.get(name, name)} | {row['right']:,} | {errors['false_negatives']:,} "
            f"| {row['wrong']:,} | {errors['false_positives']:,} |"
        )
    return lines


def published() -> list[str]:
    """Agreement and errors of each rule on published responses."""
    result = _result("real_responses.json")
    total = result["responses"]
    lines = [
        "| grader | agrees with ours | wrong answers accepted | wrong ones without a box accepted "
        "| right answers rejected |",
        "|---|---|---|---|---|",
    ]
    for name, e in result["errors"].items():
        same = result["pairs"].get(f"ours {name}")
        agrees = "" if same is None else f"{100 * same / total:.1f} %"
        boxed = e["accepts_wrong"] - e["accepts_without_box"]
        cells = [agrees, str(boxed), str(e["accepts_without_box"]), str(e["rejects_right"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main(PAGE, {"suites": suites, "published": published}))
