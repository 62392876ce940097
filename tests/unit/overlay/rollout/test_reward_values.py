"""What a user's reward function may return, and the one line about what it may not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.overlay.rollout.engine import SGRolloutActor
from sg_rlhf.overlay.rollout.executors import StrictSingleTurnExecutor, check_agent_rewards
from sg_rlhf.overlay.rollout.generator import SamplesGenerator
from sg_rlhf.overlay.rollout.samples import Sampling
from tests.unit.docs.page import TUTORIALS, blocks

SAMPLE = "Question: 6 * 7?\nAnswer: 42"


class Letters:
    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[*map(ord, text)]])}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


class Model:
    """Answers every prompt with 42."""

    async def generate(self, *_: Any, **__: Any) -> Any:
        made = SimpleNamespace(token_ids=[*map(ord, "42")], finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[made])


class Engine(SGRolloutActor):
    """The rollout engine without vLLM."""

    def __init__(self, executor: Any) -> None:
        self.executor, self._expects_reward = executor, True


def output_of(source: str, folder: Path) -> dict[str, Any]:
    """A response's output, rewarded by a file of a user."""
    file = folder / "reward.py"
    file.write_text(f"import numpy as np\nimport torch\n{source}\n")
    executor = StrictSingleTurnExecutor(str(file))
    params = SimpleNamespace(max_tokens=4, logprobs=None)
    output: dict[str, Any] = asyncio.run(
        executor.execute(SAMPLE[:-2], "42", params, 100, Letters(), Model())
    )
    return output


def returning(expression: str, prefix: str = "") -> str:
    return f"{prefix}def reward_func(queries, prompts, labels):\n    return {expression}"


@pytest.mark.parametrize(
    "source",
    [
        returning("{'rewards': torch.tensor([1])}"),
        returning("{'rewards': 1, 'scores': None, 'extra_logs': None}"),
        returning("{'rewards': [1.0], 'scores': [1.0], 'extra_logs': {}}"),
        returning("torch.tensor([1.0])"),
        returning("[1.0]"),
        returning("True"),
        returning("1"),
        returning("np.float32(1)"),
        returning("np.ones(1)"),
        returning("[{'rewards': 1.0}]"),
        returning("[torch.tensor(1.0)]"),
        returning("{'rewards': 1.0}", "async "),
    ],
)
def test_one_number_in_any_form_is_a_reward(source: str, tmp_path: Path) -> None:
    output = output_of(source, tmp_path)
    assert (output["reward"], output["scores"], output["extra_logs"]) == (1.0, 1.0, {})
    assert type(output["reward"]) is float  # torch takes no mean of whole numbers


def test_zero_is_a_reward(tmp_path: Path) -> None:
    assert output_of(returning("0"), tmp_path)["reward"] == 0.0


def test_scores_and_logs_are_floats_too(tmp_path: Path) -> None:
    source = returning(
        "{'rewards': 0.5, 'scores': torch.tensor([True]), 'extra_logs': "
        "{'a': np.int64(3), 'b': [2], 'c': torch.tensor([[1.5]]), 'd': False}}"
    )
    output = output_of(source, tmp_path)
    assert (output["reward"], output["scores"]) == (0.5, 1.0)
    assert output["extra_logs"] == {"a": 3.0, "b": 2.0, "c": 1.5, "d": 0.0}
    assert all(type(value) is float for value in output["extra_logs"].values())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (returning("None"), "it returned None (NoneType), expected a number, or a list"),
        (returning("'good'"), "it returned 'good' (str), expected a number, or a list"),
        (returning("[0.1, 0.2]"), "it returned [0.1, 0.2] (list), expected a number"),
        (returning("torch.ones(2)"), "it returned tensor([1., 1.]) (Tensor), expected a number"),
        (returning("{'reward': 1.0}"), "it returned {'reward': 1.0} (dict), a dict without `rew"),
        (returning("{}"), "it returned {} (dict), a dict without `rewards`"),
        (
            returning("[{'rewards': 1.0}, {'rewards': 0.0}]"),
            "it returned [{'rewards': 1.0}, {'rewards': 0.0}] (list), expected a number",
        ),
        (returning("{'rewards': None}"), "`rewards` is None (NoneType), expected a number"),
        (returning("{'rewards': '1'}"), "`rewards` is '1' (str), expected a number"),
        (returning("{'rewards': torch.ones(2)}"), "`rewards` is tensor([1., 1.]) (Tensor), exp"),
        (returning("{'rewards': 1, 'scores': 'high'}"), "`scores` is 'high' (str), expected a n"),
        (returning("{'rewards': 1, 'scores': [1, 2]}"), "`scores` is [1, 2] (list), expected a"),
        (returning("{'rewards': 1, 'extra_logs': 3}"), "`extra_logs` is 3 (int), expected a dict"),
        (
            returning("{'rewards': 1, 'extra_logs': {'why': 'typo'}}"),
            "`extra_logs['why']` is 'typo' (str), expected a number",
        ),
        (
            returning("{'rewards': 1, 'extra_logs': {'time': None}}"),
            "`extra_logs['time']` is None (NoneType), expected a number",
        ),
        (
            returning("{'rewards': 1, 'extra_logs': {'p': torch.ones(2)}}"),
            "`extra_logs['p']` is tensor([1., 1.]) (Tensor), expected a number",
        ),
        (returning("{'rewards': 'x'}", "async "), "`rewards` is 'x' (str), expected a number"),
        (returning("labels[1]"), "IndexError: list index out of range"),
        (returning("labels[1]", "async "), "IndexError: list index out of range"),
    ],
)
def test_anything_else_is_one_line_with_field_value_label_and_prompt(
    source: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(RewardError) as stopped:
        output_of(source, tmp_path)
    line = str(stopped.value)
    assert line.startswith("the reward function failed on a rollout (") and said in line
    assert "\n" not in line
    assert f"label '42'; prompt {SAMPLE[:-2]!r}; the sample ends: {SAMPLE!r}" in line


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("scores", torch.ones(2), "`scores` is tensor"),
        ("extra_logs", {"tool": "python"}, "`extra_logs['tool']` is 'python' (str)"),
    ],
)
def test_an_own_agent_is_checked_too(field: str, value: Any, said: str) -> None:
    output = {
        "reward": 1.0, "scores": 1.0, "extra_logs": {}, "label": "a", "prompt": "p",
        "observation_tokens": [72, 105], field: value,
    }  # fmt: skip
    engine = Engine(SimpleNamespace())
    engine._expects_reward = False  # no reward.remote_url
    with pytest.raises(RewardError) as stopped:
        engine._check_reward(output, Letters())
    assert said in str(stopped.value)


def test_where_a_reward_model_gives_it_none_is_expected() -> None:
    engine = Engine(SimpleNamespace())
    engine._expects_reward = False
    output = {"reward": None, "scores": None, "extra_logs": {}}
    engine._check_reward(output, Letters())
    assert output == {"reward": None, "scores": None, "extra_logs": {}}


def test_logs_of_some_responses_only_are_one_line() -> None:
    """Upstream ends in "Size of info[...] does not match batch_size"."""
    response = {
        "observation_tokens": [1, 2, 3, 4], "action_ranges": [(2, 4)], "reward": 1.0,
        "scores": 1.0, "rollout_log_probs": None, "prompt": "the prompt", "label": "",
        "truncated": False,
    }  # fmt: skip
    generator: Any = object.__new__(SamplesGenerator)
    generator.args = SimpleNamespace(sg=SimpleNamespace(on_nonfinite="stop"))
    generator.sampling, generator._log_names = Sampling(1, 1.0, 1.0, None, 64), None
    generator._experiences([{**response, "extra_logs": {"correct": 1.0}}])
    with pytest.raises(RewardError, match=r"'parsed' for some responses only.*'the prompt'"):
        generator._experiences([{**response, "extra_logs": {"correct": 1.0, "parsed": 1.0}}])


def test_the_agent_of_the_page_takes_a_second_attempt(tmp_path: Path) -> None:
    """docs/tutorials/3_first_domain.md, through OpenRLHF's own multi-turn executor."""
    files, _ = blocks(TUTORIALS / "3_first_domain.md")
    (tmp_path / "my_agent.py").write_text(files["my_agent.py"])
    executor = _load_agent_executor(str(tmp_path / "my_agent.py"))
    answers = iter(["\\boxed{8}", "\\boxed{7}"])

    async def generate(*_: Any, **__: Any) -> Any:
        text = next(answers)
        made = SimpleNamespace(token_ids=[*map(ord, text)], text=text, finish_reason="stop")
        return SimpleNamespace(outputs=[made])

    params = SimpleNamespace(max_tokens=20, logprobs=None)
    model = SimpleNamespace(generate=generate)
    output = asyncio.run(executor.execute("3 + 4?", "7", params, 200, Letters(), model))
    Engine(executor)._check_reward(output, Letters())
    assert Letters().decode(output["observation_tokens"]) == (
        "3 + 4?\\boxed{8}\nThat is wrong. Try again.\n\\boxed{7}"
    )
    assert (output["reward"], output["scores"]) == (1.0, 1.0)
    assert output["extra_logs"] == {"correct": 1.0, "attempts": 2.0}
    trained = [output["observation_tokens"][first:end] for first, end in output["action_ranges"]]
    assert [*map(Letters().decode, trained)] == ["\\boxed{8}", "\\boxed{7}"]


class PlainFloat(AgentInstanceBase):
    """An agent whose reward is no tensor."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Upstream demands one."""

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {"rewards": 0.5, "environment_feedback": "", "done": True}


def test_an_agents_reward_that_is_no_tensor_is_one_line() -> None:
    """Upstream ends in "'float' object has no attribute 'item'"."""

    async def generate(*_: Any, **__: Any) -> Any:
        made = SimpleNamespace(token_ids=[65], text="A", finish_reason="stop")
        return SimpleNamespace(outputs=[made])

    executor = MultiTurnAgentExecutor(PlainFloat)
    check_agent_rewards(executor)
    params, model = (
        SimpleNamespace(max_tokens=20, logprobs=None),
        SimpleNamespace(generate=generate),
    )
    with pytest.raises(RewardError) as stopped:
        asyncio.run(executor.execute("3 + 4?", "7", params, 200, Letters(), model))
    assert str(stopped.value) == (
        "PlainFloat.step returned `rewards` = 0.5 (float), expected a tensor of one number: "
        "torch.tensor(...)"
    )
