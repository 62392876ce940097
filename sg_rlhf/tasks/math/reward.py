"""Mathematics reward in the form that OpenRLHF loads by path (`--reward.remote_url FILE`).

1 where the last box of the response equals a gold answer, else 0. OpenRLHF 0.11.2 executes this
file without registering it as a module, and calls `reward_func(queries, prompts, labels)` in a
thread, with lists of one element. The labels are the data sets' `answer` field, JSON arrays of gold
answers. A hostile answer is given up after the grader's limit and counts as wrong; `timeout` and
`crash` say how often that happens.
"""

from __future__ import annotations

from typing import Any

from sg_rlhf.tasks import response
from sg_rlhf.tasks.math.data import golds_of
from sg_rlhf.tasks.math.grading import Grade, Reason, grade

__all__ = ["Grade", "Reason", "grade", "response_of", "reward_func"]

# The prompt's end but for the words that a tokenizer's clean-up could change.
MARKER = "output the final answer within \\boxed{}."


def response_of(query: str, prompt: str) -> str:
    """The response inside a query (see `tasks.response`).

    If the prompt's end is not found, the whole query is returned. Its last box is then the
    response's own, or the prompt's empty one, which is never right.
    """
    return response.response_of(query, prompt, MARKER)


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """The reward of one response, with OpenRLHF's signature.

    Returns:
        `rewards` and `scores`: 1.0 or 0.0; `extra_logs`: `correct`, `format_ok` (the response has a
        complete box), `timeout` and `crash` (grading ended so).

    Raises:
        ValueError: not exactly one query, or a label that is no JSON array of texts.
    """
    if not len(queries) == len(prompts) == len(labels) == 1:
        raise ValueError(
            "reward_func takes one query at a time, as OpenRLHF calls it; "
            f"got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels"
        )
    try:
        golds = golds_of(labels[0])
    except ValueError as error:
        raise ValueError(f"label {error} (the data set's answer field)") from None
    result = grade(response_of(queries[0], prompts[0]), golds)
    correct = float(result.correct)
    return {
        "rewards": correct,
        "scores": correct,
        "extra_logs": {
            "correct": correct,
            "format_ok": float(result.extracted is not None),
            "timeout": float(result.reason is Reason.TIMEOUT),
            "crash": float(result.reason is Reason.CRASH),
        },
    }
