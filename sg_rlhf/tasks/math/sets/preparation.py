"""From the rows of a source to those that are written, with what was found on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sg_rlhf.common.argument_types import progress_bar
from sg_rlhf.data_io.dataset_writer import UsageError
from sg_rlhf.tasks.data_source import Options
from sg_rlhf.tasks.math.data import MathRow, hold_out
from sg_rlhf.tasks.math.grading import grade
from sg_rlhf.tasks.overlap import OverlapReport, find_overlap, normalise


def prepare(
    train: list[MathRow],
    test: list[MathRow] | None,
    eval_sets: Mapping[str, Sequence[MathRow]],
    options: Options,
) -> tuple[list[MathRow], list[MathRow], dict[str, Any]]:
    """Drop what cannot be trained on or graded, and hold out a part.

    Dropped are rows without an answer or with golds that the grader refuses, then (`drop_overlap`,
    a level of `overlap.LEVELS`) problems of the evaluation sets, then (`dedup`) repeated problems.

    Args:
        test: rows that are held out already; None: `test_fraction` is drawn by `seed`.

    Returns:
        Train rows, test rows, and the facts for the manifest and the report.
    """
    with_gold = [row for row in train if row.golds]
    test_with_gold = [row for row in test or () if row.golds]
    refused = _refused_golds([*with_gold, *test_with_gold])
    answered = [row for row in with_gold if row.golds not in refused]
    of_test: dict[str, int] = {}
    if test is not None:
        of_test["test_without_answer_dropped"] = len(test) - len(test_with_gold)
        test = [row for row in test_with_gold if row.golds not in refused]
        of_test["test_ungradable_dropped"] = len(test_with_gold) - len(test)
    overlap = _overlap([*answered, *(test or ())], eval_sets, options["ngram"])
    kept = answered
    if options["drop_overlap"]:
        level = options["drop_overlap"]
        leaked = {key for found in overlap for key in found.train_keys[level]}
        kept = [row for row in answered if normalise(row.problem) not in leaked]
        test = test and [row for row in test if normalise(row.problem) not in leaked]
    unique = _first_of_each(kept) if options["dedup"] else kept
    unique_train = unique
    if test is not None:
        trained = {normalise(row.problem) for row in unique}
        of_test["test_problems_in_train"] = sum(normalise(r.problem) in trained for r in test)
    else:
        unique_train, test = hold_out(unique, options["test_fraction"], options["seed"])
    if not unique_train:
        raise UsageError(f"no training row is left of {len(train)}; nothing was written")
    facts = {
        "counts": {
            "read": len(train),
            "without_answer_dropped": len(train) - len(with_gold),
            "ungradable_dropped": len(with_gold) - len(answered),
            "overlap_dropped": len(answered) - len(kept),
            "duplicates_dropped": len(kept) - len(unique),
            "train": len(unique_train),
            "test": len(test),
            **{name: count for name, count in of_test.items() if count},
        },
        "ungradable": [
            {"golds": list(golds), "reason": reason} for golds, reason in refused.items()
        ],
        "duplicates": _duplicates(answered),
        "overlap": {found.name: found.facts() for found in overlap},
    }
    return unique_train, test, facts


def _refused_golds(rows: Sequence[MathRow]) -> dict[tuple[str, ...], str]:
    """Golds that earn nothing even as the answer itself: no response could solve such a row."""
    distinct = dict.fromkeys(row.golds for row in rows)
    refused = {}
    with progress_bar("grading the golds", "rows", len(distinct)) as bar:
        for golds in distinct:
            grades = [grade(f"\\boxed{{{gold}}}", golds) for gold in golds]
            if not any(result.correct for result in grades):
                refused[golds] = str(grades[0].reason)
            bar.update()
    return refused


def _overlap(
    rows: Sequence[MathRow], eval_sets: Mapping[str, Sequence[MathRow]], ngram: int
) -> list[OverlapReport]:
    if not eval_sets:
        return []
    with progress_bar("comparing with the evaluation sets", "rows", len(rows)) as bar:
        return find_overlap(rows, eval_sets, n=ngram, on_row=bar.update)


def _first_of_each(rows: Sequence[MathRow]) -> list[MathRow]:
    first: dict[str, MathRow] = {}
    for row in rows:
        first.setdefault(normalise(row.problem), row)
    return list(first.values())


def _duplicates(rows: Sequence[MathRow]) -> dict[str, Any]:
    """How often problems repeat, and which ones come with different golds."""
    golds: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)
    for row in rows:
        golds[normalise(row.problem)].setdefault(row.golds, row.id)
    differing = [list(found.items()) for found in golds.values() if len(found) > 1]
    return {
        "different_texts": len({row.problem for row in rows}),
        "different_problems": len(golds),
        "problems_with_different_golds": len(differing),
        "examples": [[{"id": i, "golds": list(g)} for g, i in found] for found in differing[:5]],
    }
