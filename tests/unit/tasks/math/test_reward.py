"""The reward of a response, and the prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sg_rlhf.tasks.math.domain import MATH
from sg_rlhf.tasks.math.prompt import problem_of, prompt_of

LABEL = '["42"]'
GOOD = "2 * 21 = 42, so \\boxed{42}"


@pytest.mark.parametrize(
    ("response", "correct", "format_ok"),
    [
        (GOOD, 1.0, 1.0),
        (GOOD + "<|endoftext|>", 1.0, 1.0),
        ("\\boxed{41}, no: \\boxed{42}", 1.0, 1.0),
        ("\\boxed{42}, no: \\boxed{41}", 0.0, 1.0),
        ("\\boxed{\\frac{84}{2}}", 1.0, 1.0),
        ("the answer is 42", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("\\boxed{42", 0.0, 0.0),
        ("\\boxed{}", 0.0, 1.0),
        ("\\boxed{forty-one}", 0.0, 1.0),
    ],
)
def test_one_or_zero_on_the_last_box(response, correct, format_ok):
    found = MATH.grade(response, LABEL)
    assert (found.reward, found.correct, found.format_ok) == (correct, correct == 1, format_ok == 1)
    assert found.logs == {"timeout": 0.0, "crash": 0.0}


def test_many_threads_and_a_hostile_answer_at_once():
    MATH.grade("\\boxed{1}", LABEL)  # the grader's workers are up
    hostile = "\\boxed{9^{9^{9^9}}}"
    responses = [hostile, *[f"\\boxed{{{n}}}" for n in range(38, 46)], GOOD] * 2

    def call(response: str) -> float:
        return MATH.grade(response, LABEL).reward

    with ThreadPoolExecutor(8) as threads:
        rewards = list(threads.map(call, responses))
    assert rewards == [float(response in (GOOD, "\\boxed{42}")) for response in responses]


# -- The prompt against the literal text of the published files ----------------------------------


def test_the_published_text_byte_for_byte():
    assert prompt_of("What is $1+1$?") == (
        "What is $1+1$? Let's think step by step and output the final answer within \\boxed{}."
    )


@given(st.text())
@example("  spaces stay \n")
@example("Let's think step by step and output the final answer within \\boxed{}.")
@example("")
def test_problem_of_is_its_inverse(problem):
    assert problem_of(prompt_of(problem)) == problem


@pytest.mark.parametrize(
    "prompt",
    [
        "What is $1+1$?",
        "Q Let's think step by step and output the final answer within \\boxed{}. ",
        "Q Let’s think step by step and output the final answer within \\boxed{}.",
        "QLet's think step by step and output the final answer within \\boxed{}.",
        "",
    ],
)
def test_another_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="expected a prompt that ends in"):
        problem_of(prompt)
