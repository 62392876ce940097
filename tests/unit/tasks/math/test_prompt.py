"""The mathematics prompt against the literal text of the published files."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sg_rlhf.tasks.math.prompt import problem_of, prompt_of


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
