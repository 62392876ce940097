"""A completion in OpenRLHF's reward functions, and what training reads of a grade."""

from __future__ import annotations

import pytest

from sg_rlhf.tasks import registry
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.labels import encode_golds
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.reward import Completion, RewardFields, reward_function
from sg_rlhf.tasks.search import prompt as search

ROLES = "(1) Zoey is a knight\n(2) Jack is a knave"
SOLVED = f"because</think><answer>{ROLES}</answer><|im_end|>"
PROMPTS = {
    "kk": build_prompt("Zoey says: Jack lies."),
    # Minerva's problems hold the box of an earlier part; here it is even the gold answer.
    "math": prompt_of("Part 0 gave \\boxed{42}. Now double $x = 21$."),
    "search": search.build_prompt("What is the capital of China"),
    "arithmetic": "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n",
}


def reward_of(name: str, response: str, label: str) -> RewardFields:
    """As OpenRLHF would call it."""
    domain, grader = registry.named_in(f"domain:{name}")
    given = Completion(PROMPTS[domain.name], response, label)
    return reward_function(domain, grader)(*given.reward_arguments())


@pytest.mark.parametrize(
    ("name", "response", "label", "reward", "correct", "logs"),
    [
        ("kk", SOLVED, ROLES, 3.0, 1, {"format_ok": 1, "parsed": 1}),
        ("kk", SOLVED.replace("knave", "knight"), ROLES, -0.5, 0, {"format_ok": 1, "parsed": 1}),
        ("kk", "x", ROLES, -3.0, 0, {"format_ok": 0, "parsed": 0}),
        ("kk/table5", SOLVED.replace("knave", "knight"), ROLES, -2.5, 0, {"parsed": 1}),
        ("kk/strict", SOLVED.replace("Zoey", "Old Zoey"), ROLES, -1.0, 0, {"format_ok": 1}),
        ("math", "so \\boxed{42}", '["42"]', 1.0, 1, {"format_ok": 1, "crash": 0, "timeout": 0}),
        ("math", "the answer is 42", '["42"]', 0.0, 0, {"format_ok": 0}),  # the prompt's box
        ("math", "\\boxed{\\sqrt{2}}", encode_golds(["11", "2^{1/2}"]), 1.0, 1, {}),
        ("search", "<answer> beijing. </answer>", '["Beijing"]', 1.0, 1, {"f1": 1}),
        ("search", "I do not know", '["Beijing"]', -1.0, 0, {"f1": 0}),  # the prompt's example
        ("search", "<answer> Beijing", '["Beijing"]', -1.0, 0, {"format_ok": 0}),
        ("arithmetic", "12<|im_end|>", "12", 1.0, 1, {"format_ok": 1}),
        ("arithmetic", "no idea", "5", 0.0, 0, {"format_ok": 0}),  # the question's number
    ],
)
def test_the_response_alone_gets_plain_numbers(
    name: str, response: str, label: str, reward: float, correct: float, logs: dict[str, float]
) -> None:
    found = reward_of(name, response, label)
    assert (found["rewards"], found["scores"]) == (reward, correct)
    assert found["extra_logs"].items() >= {"correct": correct, **logs}.items()
    numbers = (found["rewards"], found["scores"], *found["extra_logs"].values())
    assert all(type(value) is float for value in numbers)


@pytest.mark.parametrize("response", ["", "a", "ask", "ask again: ask"])
def test_exactly_the_prompt_is_cut(response: str) -> None:
    """A response may write the prompt again."""
    given = Completion("ask", response, "label")
    assert Completion.from_reward_arguments(*given.reward_arguments()) == given


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (["<s>ask a"], "'<s>ask a', prompt 'ask'; expected the prompt followed by the response"),
        ([], "takes one query at a time, as OpenRLHF calls it; got 0 queries, 1 prompts, 1 lab"),
        (["ask a", "ask b"], "got 2 queries"),
    ],
)
def test_a_query_without_its_prompt_is_refused(queries: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Completion.from_reward_arguments(queries, ["ask"], ["label"])


@pytest.mark.parametrize("label", ["42", "[]", '[""]', "not JSON"])
@pytest.mark.parametrize("name", ["math", "search"])
def test_a_label_that_cannot_be_read_is_an_error(name: str, label: str) -> None:
    with pytest.raises(ValueError, match="expected a JSON array of"):
        reward_of(name, "\\boxed{42}", label)
