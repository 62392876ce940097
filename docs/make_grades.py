"""Writes the tables of docs/evaluation.md on the grader of mathematics, from the results.

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


def suites() -> list[str]:
    """Both error rates on every suite, before and now."""
    lines = [
        "| suite | right answers | wrong answers | false positives, before | now "
        "| false negatives, before | now |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in _result("grading_suites.json")["suites"].items():
        cells = [f"{row['right']:,}", f"{row['wrong']:,}"]
        for kind in ("false_positives", "false_negatives"):
            cells += [f"{row[label][kind]:,}" for label in ("before", "after")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def published() -> list[str]:
    """Agreement and errors of each rule on published responses."""
    result = _result("real_responses.json")
    total = result["responses"]
    lines = [
        "| grader | agrees with ours | accepts a wrong answer | accepts one without a box "
        "| rejects a right one |",
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
