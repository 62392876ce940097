"""Scores of alternative graders on the same responses (`Grade.others`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sg_rlhf.tasks.suite import ExtraTable, Results

OURS = "ours"


def statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For `Suite.statistics`: each alternative grader's scores on one benchmark's rows.

    Nothing for a grader without a verdict on every row, as where a run that was begun by an older
    version was resumed.
    """
    names = rows[0].get("graders", {}) if rows else {}
    judged = [name for name in names if all(name in row.get("graders", {}) for row in rows)]
    return {"graders": {name: _beside_ours(name, rows) for name in judged}} if judged else {}


def tables(results: Results) -> Sequence[ExtraTable]:
    """For `Suite.tables`: one row per benchmark and grader; none without alternative graders."""
    rows = []
    for benchmark, found in results["benchmarks"].items():
        scores = found.get("graders", {})
        if scores:
            # Over all responses, as theirs: a benchmark's own score may be that of some groups.
            first = next(iter(scores.values()))
            responses = found["n_questions"] * found["settings"]["n"]
            ours = first["accuracy"] + (first["only_ours"] - first["only_theirs"]) / responses
            rows.append([benchmark, OURS, f"{ours:.3f}", "", "", ""])
        for name, score in scores.items():
            counts = (score["only_ours"], score["only_theirs"], score["no_verdict"])
            rows.append([benchmark, name, f"{score['accuracy']:.3f}", *map(str, counts)])
    if not rows:
        return ()
    heads = ("Benchmark", "Grader", "Accuracy", "Only ours", "Only theirs", "No verdict")
    note = (
        "Mean over all responses. Only ours, only theirs: responses that one of the two accepts. "
        "No verdict: out of time or memory, counted as wrong."
    )
    return (ExtraTable("The same responses by other graders", "responses", heads, rows, note),)


def _beside_ours(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs = [(bool(row["correct"]), row["graders"][name]) for row in rows]
    return {
        "accuracy": sum(bool(theirs) for _, theirs in pairs) / len(pairs),
        "only_ours": sum(ours and not theirs for ours, theirs in pairs),
        "only_theirs": sum(bool(theirs) and not ours for ours, theirs in pairs),
        "no_verdict": sum(theirs is None for _, theirs in pairs),
    }
