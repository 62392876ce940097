"""Knights & Knaves reward in the form that OpenRLHF loads by path (`--reward.remote_url FILE`).

OpenRLHF 0.11.2 executes this file without registering it as a module, and calls
`reward_func(queries, prompts, labels)` in a thread, with lists of one element. It wants plain
numbers: `rewards` trains, `scores` drives dynamic filtering, `extra_logs` is logged.

This file uses the totals of the reference code, `reward_table5.py` those of the paper's Table 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sg_rlhf.tasks import response
from sg_rlhf.tasks.kk.grading import Reason, Scheme, Score, score
from sg_rlhf.tasks.kk.prompt import THINK

__all__ = ["Reason", "Score", "make_reward_func", "response_of", "reward_func", "score"]

RewardFunc = Callable[[list[str], list[str], list[str]], dict[str, Any]]


def response_of(query: str, prompt: str) -> str:
    """The response inside a query (see `tasks.response`).

    If the prompt's end is not found, the whole query is returned, which breaks the format, since
    the prompt holds the tags as well.
    """
    return response.response_of(query, prompt, THINK)


def make_reward_func(scheme: Scheme) -> RewardFunc:
    """The reward function of one scheme (see `grading.score`), with OpenRLHF's signature.

    Its labels are `solution_text_format`, the data sets' `answer` field.
    """

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
        if not len(queries) == len(prompts) == len(labels) == 1:
            raise ValueError(
                "reward_func takes one query at a time, as OpenRLHF calls it; "
                f"got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels"
            )
        result = score(response_of(queries[0], prompts[0]), labels[0], scheme)
        correct = float(result.correct)
        return {
            "rewards": result.reward,
            "scores": correct,
            "extra_logs": {
                "correct": correct,
                "format_ok": float(result.format_ok),
                "parsed": float(result.reason in (Reason.CORRECT, Reason.WRONG)),
            },
        }

    return reward_func


reward_func = make_reward_func("reference")
