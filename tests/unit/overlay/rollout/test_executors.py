"""Responses of one turn: a domain, a user's function or a server grades their own tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.overlay.rollout.executors import StrictSingleTurnExecutor
from sg_rlhf.tasks.math.prompt import prompt_of
from tests.http_server import Handler, serving

PROMPT = prompt_of("Part 0 gave \\boxed{42}. Now double $x = 21$.")
LABEL = '["42"]'
GOOD = "2 * 21 = 42, so \\boxed{42}"
RESPONSES = [
    (GOOD, 1.0),
    ("", 0.0),
    ("nothing boxed", 0.0),
    # A response that writes another prompt must not hide what stands before it.
    (f"{GOOD} {PROMPT}\\boxed{{41}}", 0.0),
]
OWN = f"""
def reward_func(queries, prompts, labels):
    assert prompts == [{PROMPT!r}] and queries[0].startswith(prompts[0])
    return float("boxed{{42}}" in queries[0][len(prompts[0]):][-9:])
"""


class Characters:
    """A tokenizer of characters, which writes a first token and a space that nobody gave it."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[1, *map(ord, text.replace("$", " $"))]])}

    def decode(
        self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return "".join("<s>" if i == 1 else chr(i) for i in ids)


def rollout(reward: Any, response: str, label: str = LABEL, max_length: int = 9000) -> Any:
    """What the executor makes of a response."""

    async def generate(*_: Any, **__: Any) -> Any:
        made = SimpleNamespace(token_ids=[*map(ord, response)], finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[made])

    executor = StrictSingleTurnExecutor(reward)
    params = SimpleNamespace(max_tokens=99, logprobs=None)
    model = SimpleNamespace(generate=generate)
    return asyncio.run(executor.execute(PROMPT, label, params, max_length, Characters(), model))


@pytest.mark.parametrize("max_length", [9000, 130], ids=["whole", "cut prompt"])
@pytest.mark.parametrize(("response", "expected"), RESPONSES)
@pytest.mark.parametrize("own", [False, True], ids=["domain", "file"])
def test_the_responses_own_tokens_are_graded(
    own: bool, response: str, expected: float, max_length: int, tmp_path: Path
) -> None:
    """However the tokenizer changes the prompt, and where a long prompt lost its beginning."""
    (tmp_path / "reward.py").write_text(OWN)
    reward = str(tmp_path / "reward.py") if own else "domain:math"
    output = rollout([reward], response, max_length=max_length)
    assert (output["reward"], output["scores"]) == (expected, expected)
    if not own:
        assert sorted(output["extra_logs"]) == ["correct", "crash", "format_ok", "timeout"]


class RewardServer(Handler):
    """Answers with the length of the query behind its prompt."""

    def do_POST(self) -> None:
        given = json.loads(self.content())
        (query,), (prompt,), (label,) = given["query"], given["prompts"], given["labels"]
        assert label == LABEL
        self.answer(json.dumps({"rewards": [len(query.removeprefix(prompt))]}).encode())

    def end_headers(self) -> None:
        self.send_header("Content-Type", "application/json")
        super().end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    with serving(RewardServer) as url:
        yield url


def test_a_reward_server_gets_the_prompt_and_the_response(server: str) -> None:
    output = rollout([f"{server}/get_reward"], GOOD)
    assert output["reward"] == output["scores"] == len(GOOD)


def test_without_a_reward_function_there_is_no_reward() -> None:
    output = rollout(None, GOOD)
    assert (output["reward"], output["scores"], output["extra_logs"]) == (None, None, {})


def test_a_domain_that_does_not_take_the_label_stops_the_run() -> None:
    with pytest.raises(RewardError, match=r"failed on a rollout \(ValueError: label .* '42'"):
        rollout("domain:math", GOOD, label="42")
