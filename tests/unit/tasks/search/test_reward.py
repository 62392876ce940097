"""The reward in OpenRLHF's form: the response alone is graded."""

from __future__ import annotations

import pytest

from sg_rlhf.tasks.reward import response_of, reward_named
from sg_rlhf.tasks.search.domain import SEARCH
from sg_rlhf.tasks.search.prompt import build_prompt

REWARD = reward_named("domain:search")
PROMPT = (
    "<|im_start|>user\n" + build_prompt("What is the capital of China") + "<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def reward(response: str, label: str = '["Beijing"]', query: str | None = None) -> float:
    result = REWARD([query or PROMPT + response], [PROMPT], [label])
    assert result["scores"] == result["extra_logs"]["correct"]
    return float(result["rewards"])


def test_the_prompts_example_answer_is_not_graded() -> None:
    assert reward("I do not know") == -1.0
    assert reward("<answer> Paris </answer>") == -1.0
    assert reward("<think> hm </think> <answer> beijing. </answer>") == 1.0
    assert reward("<answer> Beijing", '["Beijing"]') == -1.0


def test_nor_where_a_tokenizer_changed_the_prompt() -> None:
    changed = PROMPT.replace("Answer the", "Answer  the")
    assert reward("", query=changed + "no answer") == -1.0
    assert reward("", query=changed + "<answer>Beijing</answer>") == 1.0
    cut = response_of(PROMPT[-150:] + "mine", PROMPT, SEARCH.prompt_end)
    assert cut.endswith("mine") and "<answer>" not in cut


def test_bad_calls_and_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a JSON array"):
        reward("x", "Beijing")
    with pytest.raises(ValueError, match="one query at a time"):
        REWARD(["a", "b"], ["a", "b"], ["c", "d"])
