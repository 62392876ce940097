"""A domain of several turns in one file, in training, in evaluation and for other trainers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob

from sg_rlhf.eval import suites
from sg_rlhf.eval.answer import answer, samples_of
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.eval.store import Store
from sg_rlhf.overlay.rollout.environment_agent import load_agent
from sg_rlhf.tasks.codec import CharacterCodec
from sg_rlhf.tasks.rollout import Turn
from sg_rlhf.tasks.suite import load_questions
from tests.domains.guess import GUESS, PROMPT, GuessEnvironment

CODEC = CharacterCodec()
PLACE = "tests.domains.guess:GUESS"


class Scripted:
    """vLLM's `generate`: a turn for each request, one token per character."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.params: list[SamplingParams] = []

    async def generate(self, context: list[int], params: SamplingParams) -> Any:
        self.params.append(params)
        ids = CODEC.encode(self.turns.pop(0))[: params.max_tokens]
        log_probs = [{token: Logprob(-1.0)} for token in ids]
        reason = "stop" if ids[-1:] == CODEC.encode("\n") else "length"
        output = SimpleNamespace(token_ids=ids, logprobs=log_probs, finish_reason=reason)
        return SimpleNamespace(outputs=[output])


class Characters:
    """A tokenizer of characters, with what `TokenizerCodec` asks of one."""

    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    all_special_tokens = ()

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": CODEC.encode(text)}

    def decode(self, ids: list[int], **_: Any) -> str:
        return CODEC.decode(ids)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("turns", "text", "reward", "truncated"),
    [
        ([" d\n", " b\n"], " d\nearlier\nGuess: b\n", 1.0, False),
        ([" a\n", " g\n", " c\n"], " a\nlater\nGuess: g\nearlier\nGuess: c\n", 0.0, True),
        # The limit of a turn.
        ([" no idea at all", " b\n"], " no ideaearlier\nGuess: b\n", 1.0, False),
    ],
)
def test_it_is_trained_on(turns: list[str], text: str, reward: float, truncated: bool) -> None:
    agent = load_agent(f"domain:{PLACE}")
    engine = Scripted(*turns)
    shared = SamplingParams(max_tokens=200, logprobs=1)
    found = asyncio.run(agent.execute(PROMPT, "b", shared, 1000, Characters(), engine))
    assert CODEC.decode(found["observation_tokens"]) == PROMPT + text
    assert (found["reward"], found["truncated"]) == (reward, truncated)
    written = [CODEC.decode(found["observation_tokens"][a:b]) for a, b in found["action_ranges"]]
    assert written == [turn[:8] for turn in turns]
    assert sum(value != 0 for value in found["rollout_log_probs"]) == sum(map(len, written))
    logs = found["extra_logs"]
    assert (logs["turns"], logs["guesses"]) == (len(turns), len(turns))
    assert engine.params[0].stop == ["\n"] and engine.params[0].max_tokens == 8


def test_a_reply_without_room_for_another_turn_ends_the_episode() -> None:
    agent = load_agent(f"domain:{PLACE}")
    shared = SamplingParams(max_tokens=20)
    found = asyncio.run(agent.execute(PROMPT, "b", shared, 1000, Characters(), Scripted(" a\n")))
    assert found["truncated"] and found["reward"] == 0.0
    assert CODEC.decode(found["observation_tokens"]) == PROMPT + " a\n"


class Halving:
    """An engine of evaluation that always halves what is left."""

    in_flight = 3

    async def generate(self, sample: Sample) -> Sample:
        low, high = 0, 7
        guess = "d"
        for line in CODEC.decode(sample.prompt_ids)[len(PROMPT) :].split("\n"):
            if line == "later":
                low = "abcdefgh".index(guess) + 1
            if line == "earlier":
                high = "abcdefgh".index(guess) - 1
            guess = "abcdefgh"[(low + high) // 2]
        ids = CODEC.encode(f" {guess}\n")
        return replace(sample, finish_reason="stop", tokens=len(ids), token_ids=tuple(ids))

    def close(self) -> None:
        pass


def test_it_is_evaluated(tmp_path: Path) -> None:
    suite = suites.suite_at(PLACE)
    domain = suites.domain_of(suite, PLACE)
    assert domain is GUESS
    environment = suites.environment_of(domain, {})
    assert environment is not None
    loaded = load_questions(suite.benchmarks, None, None)
    samples = samples_of(loaded, lambda ps: [CODEC.encode(p) for p in ps], None, 0)
    samples = [replace(s, prompt_ids=tuple(CODEC.encode(s.question.prompt))) for s in samples]
    with Store(tmp_path / "out") as store:
        asyncio.run(answer(samples, Halving(), store, 0, environment, CODEC))
    found = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").open()]
    right = {row["gold"]: row["correct"] for row in found}
    assert right == {letter: letter != "h" for letter in "abcdefgh"}  # h is the fourth guess
    assert {len(row["turns"]) for row in found} == {1, 2, 3}


def test_another_trainer_steps_it() -> None:
    episode = GuessEnvironment().begin({"answer": "b"}, CODEC)
    first = asyncio.run(episode.step(Turn(" d")))
    assert (first.text, first.done) == ("earlier\nGuess:", False)
    assert asyncio.run(episode.step(Turn(" b"))).done and episode.grade().correct
