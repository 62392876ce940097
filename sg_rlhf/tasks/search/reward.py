"""Exact-match reward in the form that OpenRLHF loads by path (`--reward.remote_url FILE`).

For answering without a search engine: the baseline beside the agent, which grades its dialogues
itself, with the same grader. OpenRLHF 0.11.2 executes this file without registering it as a module
and calls `reward_func(queries, prompts, labels)` in a thread, with lists of one element.
"""

from __future__ import annotations

from typing import Any

from sg_rlhf.tasks import response
from sg_rlhf.tasks.search.grading import parse_golds, score
from sg_rlhf.tasks.search.protocol import answer_of

__all__ = ["response_of", "reward_func"]

# Near the prompt's end in every style and chat template.
_MARKER = "Question:"


def response_of(query: str, prompt: str) -> str:
    """The response inside a query: the prompt's example answer must not be graded."""
    return response.response_of(query, prompt, _MARKER)


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """+1 for a right answer and -1 otherwise (Eq. 20); the labels are JSON arrays of golds."""
    if not len(queries) == len(prompts) == len(labels) == 1:
        raise ValueError(
            "reward_func takes one query at a time, as OpenRLHF calls it; "
            f"got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels"
        )
    answer = answer_of(response_of(queries[0], prompts[0]))
    result = score(answer, parse_golds(labels[0]))
    correct = float(result.correct)
    return {
        "rewards": result.reward,
        "scores": correct,
        "extra_logs": {"correct": correct, "f1": result.f1, "format_ok": float(bool(answer))},
    }
