"""Metrics of the search dialogues of an evaluation, by benchmark, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sg_rlhf.common.text import EMPTY
from sg_rlhf.tasks.suite import ExtraTable

#: Mean over questions in `results.json` -> the key of a dialogue's logs (`Episode.grade`).
_MEANS = {
    "searches_per_question": "searches",
    "turns_per_question": "turns",
    "invalid_actions_per_question": "invalid_actions",
    "answered_rate": "answered",
    "f1": "f1",
    "gold_retrieved_rate": "gold_retrieved",
    "answer_retrieved_rate": "answer_retrieved",
}
#: Head of a column, its metric, and how it is written.
_COLUMNS = (
    ("Searches", "searches_per_question", ".2f"),
    ("Turns", "turns_per_question", ".2f"),
    ("Invalid", "invalid_actions_per_question", ".2f"),
    ("Answered", "answered_rate", ".1%"),
    ("F1", "f1", ".3f"),
    ("Gold found", "gold_retrieved_rate", ".1%"),
    ("Answer found", "answer_retrieved_rate", ".1%"),
    ("Empty results", "empty_results", ".0f"),
    ("Failures", "retrieval_failures", ".0f"),
    ("Seconds a search", "seconds_per_search", ".3f"),
)
_NOTE = (
    "Means over questions; empty results are a count, failures are dialogues that were repeated "
    "because a search failed. Gold found: a reference answer is in the retrieved passages."
)


def table(found: Mapping[str, Mapping[str, float | None]]) -> ExtraTable:
    """The metrics of each set."""
    rows = [
        [name, *(_written(metrics[key], style) for _, key, style in _COLUMNS)]
        for name, metrics in found.items()
    ]
    heads = ("Set", *(head for head, _, _ in _COLUMNS))
    return ExtraTable("Searches", heads, rows, _NOTE)


def _written(value: float | None, style: str) -> str:
    return EMPTY if value is None else format(value, style)


def of_benchmark(rows: Sequence[Mapping[str, Any]], failures: int) -> dict[str, float | None]:
    """The metrics of a benchmark's dialogues; `failures` were repeated because a search failed."""

    def total(name: str) -> float:
        return float(sum(row["dialogue"].get(name, 0.0) for row in rows))

    searches = total("searches")
    return {
        **{metric: total(name) / len(rows) for metric, name in _MEANS.items()},
        "empty_results": total("retrieval_empty"),
        "retrieval_failures": failures,
        "seconds_per_search": total("search_seconds") / searches if searches else None,
    }
