"""Write the tables of lab/experiments/graders/README.md from the results.

    python docs/make_grades.py [--check]

``--check`` writes nothing and fails if the page would change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_tables import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "lab" / "experiments" / "graders" / "README.md"
RESULTS = ROOT / "lab" / "experiments" / "graders" / "results"


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return result


#: Rows of the table: a title, and the suites that it sums up.
ROWS = {
    "tests of seven other graders": (
        "Math-Verify's tests",
        "Qwen2.5-Math's",
        "Hendrycks' `is_equiv`",
        "inspect_ai's",
        "tinker-cookbook's",
        "slime's",
        "lighteval's",
    ),
    "hand-made forms and near misses": ("hand-made forms and near misses",),
    "reference answers, written differently": ("golds written otherwise",),
    "reference answers with one change": ("golds with one certified change",),
    "every reference answer, rewritten and altered": ("changes of every gold",),
    "published responses": ("published responses",),
}


def suites() -> list[str]:
    """Both kinds of error, by source of the answers, and their sums."""
    found = _result("grading_suites.json")["suites"]
    assert sorted(name for names in ROWS.values() for name in names) == sorted(found)
    lines = [
        "| answers | right ones | rejected | wrong ones | accepted |",
        "|---|---|---|---|---|",
    ]
    for title, names in {**ROWS, "all": tuple(found)}.items():
        right, wrong = (sum(found[name][kind] for name in names) for kind in ("right", "wrong"))
        rejected, accepted = (
            sum(found[name]["after"][kind] for name in names)
            for kind in ("false_negatives", "false_positives")
        )
        lines.append(f"| {title} | {right:,} | {rejected:,} | {wrong:,} | {accepted:,} |")
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
