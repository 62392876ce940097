"""The reward of a response, and the prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sg_rlhf.tasks.labels import encode_golds
from sg_rlhf.tasks.math.domain import MATH
from sg_rlhf.tasks.math.prompt import problem_of, prompt_of
from sg_rlhf.tasks.reward import response_of, reward_named

# -- The reward as OpenRLHF calls it: the response alone is graded -------------------------------


REWARD = reward_named("domain:math")
# Minerva's problems hold the box of an earlier part; here it is even the gold answer.
PROMPT = prompt_of("Part 0 gave \\boxed{42}. Now double $x = 21$. " + "Think well. " * 20)
LABEL = encode_golds(["42"])
GOOD = "2 * 21 = 42, so \\boxed{42}"


def graded(response: str, label: str = LABEL, prompt: str = PROMPT) -> tuple[float, ...]:
    info = REWARD([prompt + response], [prompt], [label])
    logs = info["extra_logs"]
    assert sorted(logs) == ["correct", "crash", "format_ok", "timeout"]
    assert info["rewards"] == info["scores"] == logs["correct"]
    values = (info["rewards"], info["scores"], *logs.values())
    assert all(type(value) is float for value in values)
    return logs["correct"], logs["format_ok"], logs["timeout"], logs["crash"]


@pytest.mark.parametrize(
    ("response", "correct", "format_ok"),
    [
        (GOOD, 1.0, 1.0),
        (GOOD + "<|endoftext|>", 1.0, 1.0),
        ("\\boxed{41}, no: \\boxed{42}", 1.0, 1.0),
        ("\\boxed{42}, no: \\boxed{41}", 0.0, 1.0),
        ("\\boxed{\\frac{84}{2}}", 1.0, 1.0),
        ("the answer is 42", 0.0, 0.0),  # the prompt's own boxes do not count
        ("", 0.0, 0.0),
        ("\\boxed{42", 0.0, 0.0),
        ("\\boxed{}", 0.0, 1.0),
        ("\\boxed{forty-one}", 0.0, 1.0),
    ],
)
def test_one_or_zero_on_the_last_box(response, correct, format_ok):
    assert graded(response) == (correct, format_ok, 0.0, 0.0)


def test_any_gold_will_do():
    label = encode_golds(["11", "\\sqrt{2}", "2^{1/2}"])
    assert graded("\\boxed{\\sqrt{2}}", label)[0] == 1.0
    assert graded("\\boxed{11}", label)[0] == 1.0
    assert graded("\\boxed{12}", label)[0] == 0.0


@pytest.mark.parametrize(
    "query_of",
    [
        lambda prompt, response: prompt + response,
        lambda prompt, response: "<s>" + prompt + response,  # a token added in front
        lambda prompt, response: prompt.replace(" x", "x").replace("$.", "$ .") + response,
        lambda prompt, response: prompt.replace("Let's", "Let 's") + response,
        lambda prompt, response: prompt[-150:] + response,  # upstream cuts long prompts in front
        lambda prompt, response: prompt[-60:] + response,
    ],
)
@pytest.mark.parametrize(
    "response",
    [
        GOOD,
        "",
        "nothing boxed",
        # A response that writes another prompt must not hide what stands before it.
        f"\\boxed{{41}} {PROMPT}{GOOD}",
    ],
)
def test_only_the_response_is_graded(query_of, response):
    assert response_of(query_of(PROMPT, response), PROMPT, MATH.prompt_end) == response


def test_a_prompt_that_is_not_found_earns_nothing():
    assert response_of("xyz", PROMPT, MATH.prompt_end) == "xyz"
    mangled = PROMPT.upper().replace("\\BOXED", "\\boxed")
    assert REWARD([mangled + " no box"], [PROMPT], [LABEL])["rewards"] == 0.0


def test_one_query_a_call_and_a_readable_label():
    with pytest.raises(ValueError, match="one query at a time"):
        REWARD(["a", "b"], ["a", "b"], [LABEL, LABEL])
    for label in ("42", "[]", '[""]', "not JSON"):
        with pytest.raises(ValueError, match="label .* expected a JSON array of reference answers"):
            REWARD([PROMPT + GOOD], [PROMPT], [label])


def test_many_threads_and_a_hostile_answer_at_once():
    graded("\\boxed{1}")  # the grader's workers are up
    hostile = "\\boxed{9^{9^{9^9}}}"
    responses = [hostile, *[f"\\boxed{{{n}}}" for n in range(38, 46)], GOOD] * 2

    def call(response: str) -> float:
        return REWARD([PROMPT + response], [PROMPT], [LABEL])["rewards"]

    with ThreadPoolExecutor(8) as threads:
        rewards = list(threads.map(call, responses))
    assert rewards == [float(response in (GOOD, "\\boxed{42}")) for response in responses]


def test_upstreams_own_executor_gets_our_numbers(rollout):
    for response, correct in {GOOD: 1.0, "\\boxed{41}": 0.0, "no box": 0.0}.items():
        output = rollout("domain:math", PROMPT, LABEL, response)
        assert (output["reward"], output["scores"]) == (correct, correct)
        assert output["extra_logs"]["correct"] == correct
        assert output["extra_logs"]["format_ok"] == float("\\boxed{" in response)


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
