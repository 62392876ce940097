"""What the dialogues of an evaluation did: figures by benchmark, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sg_rlhf.common.text import EMPTY
from sg_rlhf.tasks.suite import ExtraTable, Results

_HEADS = (
    "Set", "Searches", "Turns", "Invalid", "Answered", "F1", "Gold found", "Answer found",
    "Empty results", "Failures", "Seconds a search",
)  # fmt: skip
_NOTE = (
    "Means over questions; empty results are a count, failures are dialogues that were repeated "
    "because a search failed. Gold found: a reference answer is in the retrieved passages."
)


def table(results: Results) -> ExtraTable | None:
    """What the dialogues of each set did; None where none was held."""
    rows = []
    for name, described in results["benchmarks"].items():
        found = described.get("search")
        if found is None:
            continue
        seconds = found["seconds_per_search"]
        rows.append(
            [
                name,
                f"{found['searches_per_question']:.2f}",
                f"{found['turns_per_question']:.2f}",
                f"{found['invalid_actions_per_question']:.2f}",
                f"{found['answered_rate']:.1%}",
                f"{found['f1']:.3f}",
                f"{found['gold_retrieved_rate']:.1%}",
                f"{found['answer_retrieved_rate']:.1%}",
                f"{found['empty_results']:.0f}",
                f"{found['retrieval_failures']:.0f}",
                EMPTY if seconds is None else f"{seconds:.3f}",
            ]
        )
    return ExtraTable("Searches", "means over questions", _HEADS, rows, _NOTE) if rows else None


def of_benchmark(rows: Sequence[Mapping[str, Any]], failures: int) -> dict[str, float | None]:
    """What the dialogues of a benchmark did; means over questions unless the name says otherwise.

    A dialogue that had no room for a turn did nothing. `seconds_per_search` is None without one.

    Args:
        failures: dialogues that were broken off, and held again later, because a search failed.
    """
    facts = [row["dialogue"] for row in rows]

    def total(name: str) -> float:
        return float(sum(fact.get(name, 0.0) for fact in facts))

    n, searches = len(rows), total("searches")
    return {
        "searches_per_question": searches / n,
        "turns_per_question": total("turns") / n,
        "invalid_actions_per_question": total("invalid_actions") / n,
        "answered_rate": total("answered") / n,
        "f1": total("f1") / n,
        "gold_retrieved_rate": total("gold_retrieved") / n,
        "answer_retrieved_rate": total("answer_retrieved") / n,
        "empty_results": total("retrieval_empty"),
        "retrieval_failures": failures,
        "seconds_per_search": total("search_seconds") / searches if searches else None,
    }
