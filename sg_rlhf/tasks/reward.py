"""The reward functions of all domains, as OpenRLHF calls them.

A recipe names one as `reward.remote_url: domain:NAME` or `domain:NAME/GRADER`. A domain in a file
of its own may also define `reward_func = reward_function(DOMAIN)` there, for `reward.remote_url:
FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from sg_rlhf.tasks import registry
from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grader

RewardFunc: TypeAlias = Callable[[list[str], list[str], list[str]], dict[str, Any]]


def reward_function(domain: Domain, grade: Grader | None = None) -> RewardFunc:
    """The `reward_func(queries, prompts, labels)` of a domain, with OpenRLHF's signature.

    OpenRLHF 0.11.2 executes the file that holds it without registering it as a module, and calls it
    in a thread, with lists of one element. It wants plain numbers: `rewards` trains, `scores` (1.0
    or 0.0) drives dynamic filtering, `extra_logs` is logged: `correct`, `format_ok` and the
    domain's own figures (`Grade.logs`). The labels are the data sets' `answer` field.

    Args:
        grade: another grader than the domain's own, such as another scale of rewards.
    """
    grader = grade or domain.grade

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
        if not len(queries) == len(prompts) == len(labels) == 1:
            raise ValueError(
                "reward_func takes one query at a time, as OpenRLHF calls it; "
                f"got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels"
            )
        found = grader(response_of(queries[0], prompts[0], domain.prompt_end), labels[0])
        correct = float(found.correct)
        return {
            "rewards": found.reward,
            "scores": correct,
            "extra_logs": {
                "correct": correct,
                "format_ok": float(found.format_ok),
                **found.logs,
            },
        }

    return reward_func


def reward_named(value: str) -> RewardFunc:
    """The reward function of `domain:NAME` or `domain:NAME/GRADER`.

    Raises:
        ValueError: there is no such domain or grader.
    """
    return reward_function(*registry.named_in(value))


def response_of(query: str, prompt: str, marker: str) -> str:
    """The response inside a query (prompt and response, decoded together).

    A tokenizer round trip can change white space or add a token at the front, and a prompt that is
    too long loses its beginning. Then the prompt's end is looked for as its last 100 characters,
    and as its last `marker` counted from the left. The first place found counts: a response that
    writes a new assistant turn must not choose which part of it is graded.

    Args:
        marker: text near the prompt's end that a round trip keeps; what follows its last occurrence
            in the prompt is taken for the response's.

    Returns:
        The text behind the prompt; the whole query if the prompt's end is not in it.
    """
    if query.startswith(prompt):
        return query[len(prompt) :]
    ends = []
    tail = prompt[-100:]
    at = query.find(tail)
    if at >= 0:
        ends.append(at + len(tail))
    n_markers = prompt.count(marker)
    pieces = query.split(marker, n_markers)
    if len(pieces) == n_markers + 1:
        ends.append(len(query) - len(pieces[-1]))
    return query[min(ends, default=0) :]
