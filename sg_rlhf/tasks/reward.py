"""Rewards of completions, and their form in OpenRLHF's reward functions.

A domain in a file of its own may define `reward_func = reward_function(DOMAIN)` there, for
`reward.remote_url: FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade, Grader

#: `reward_func(queries, prompts, labels)` as OpenRLHF calls it, with lists of one element.
RewardFunc: TypeAlias = Callable[[list[str], list[str], list[str]], Any]


@dataclass(frozen=True)
class Completion:
    """A response to grade: the model's tokens as text, special tokens written out.

    The prompt is as the data set or the chat template wrote it; the label is a row's `answer`.
    """

    prompt: str
    response: str
    label: str

    def reward_arguments(self) -> tuple[list[str], list[str], list[str]]:
        """The arguments of a `reward_func`; a query is the prompt followed by the response."""
        return [self.prompt + self.response], [self.prompt], [self.label]

    @classmethod
    def from_reward_arguments(
        cls, queries: list[str], prompts: list[str], labels: list[str]
    ) -> Completion:
        """The inverse of `reward_arguments`; a `ValueError` where there is none."""
        if not len(queries) == len(prompts) == len(labels) == 1:
            raise ValueError(
                "reward_func takes one query at a time, as OpenRLHF calls it; "
                f"got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels"
            )
        (query,), (prompt,), (label,) = queries, prompts, labels
        if not query.startswith(prompt):
            raise ValueError(
                f"the query does not begin with its prompt: query {query[:60]!r}, prompt "
                f"{prompt[:60]!r}; expected the prompt followed by the response"
            )
        return cls(prompt, query[len(prompt) :], label)


class RewardFields(TypedDict):
    """What training reads of a reward; `scores` are for dynamic filtering."""

    rewards: float
    scores: float
    extra_logs: dict[str, float]


def fields_of(grade: Grade) -> RewardFields:
    """A grade as plain numbers; `extra_logs` has `correct`, `format_ok` and `Grade.logs`."""
    correct = float(grade.correct)
    logs = {"correct": correct, "format_ok": float(grade.format_ok), **grade.logs}
    return {"rewards": grade.reward, "scores": correct, "extra_logs": logs}


def reward_function(domain: Domain, grade: Grader | None = None) -> RewardFunc:
    """The `reward_func(queries, prompts, labels)` of a domain, or of another of its graders."""
    grader = grade or domain.grade

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> RewardFields:
        completion = Completion.from_reward_arguments(queries, prompts, labels)
        return fields_of(grader(completion.response, completion.label))

    return reward_func
