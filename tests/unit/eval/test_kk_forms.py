"""Prompts in the form of a model, and dialogues of several turns."""

from __future__ import annotations

import asyncio
import functools
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sg_rlhf.eval.answer import answer, samples_of
from sg_rlhf.eval.store import Store
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.codec import CharacterCodec
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.kk.prompt import SYSTEM, build_prompt
from sg_rlhf.tasks.kk.suite import SUITE
from sg_rlhf.tasks.questions import EvalError, Question
from sg_rlhf.tasks.rollout import Environment, Episode, EpisodeAborted
from sg_rlhf.tasks.suite import Benchmark, Setup
from tests.unit.families import FAMILIES

# -- Knights & Knaves are asked in the form of the model that answers, and end with its turn -----


def prepared(folder: Path, tokenizer: Any, *only: str) -> list[Benchmark]:
    with ExitStack() as resources:
        load = None if tokenizer is None else lambda: tokenizer
        setup = Setup(SUITE.select(only), {}, resources, folder, limit=7, tokenizer=load)
        # The way of loading is another function each time.
        return [replace(b, load=SUITE.benchmarks[0].load) for b in SUITE.prepare(setup).benchmarks]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_in_the_models_form_with_one_bos(
    puzzle_folder: Path, tmp_path: Path, name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FAMILIES[name].write(tmp_path))
    loaded = prepared(puzzle_folder, tokenizer)
    turn_end = tokenizer.convert_tokens_to_ids(FAMILIES[name].turn_end)
    for benchmark in loaded:
        raw = benchmark.family == "official"
        for question in benchmark.questions:
            assert raw or (
                SYSTEM.strip() in question.prompt and question.prompt.endswith("<think>")
            )
            assert chat.supports(question.prompt, tokenizer)
    for sample in samples_of(loaded, lambda p: chat.encode(p, tokenizer), None, 0, tokenizer):
        bos = sample.prompt_ids.count(tokenizer.bos_token_id)
        assert bos == (FAMILIES[name].bos is not None)
        raw = sample.benchmark.family == "official"
        assert sample.stop_ids == (() if raw else (turn_end,))


def test_a_model_that_knows_chatml_gets_the_papers_prompt_whatever_its_template(
    puzzle_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FAMILIES["qwen2.5-base"].write(tmp_path))
    tokenizer.chat_template = None
    by_server = prepared(puzzle_folder, None, "paper")
    assert prepared(puzzle_folder, tokenizer, "paper") == by_server
    start = build_prompt("").partition("<|im_end|>")[0]
    assert all(q.prompt.startswith(start) for q in by_server[0].questions)


def test_a_model_without_any_chat_form_is_refused_but_for_the_plain_harness(
    puzzle_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FAMILIES["mistral-v0.3"].write(tmp_path))
    tokenizer.chat_template = None
    assert prepared(puzzle_folder, tokenizer, "official")
    with pytest.raises(EvalError, match="neither ChatML nor a chat template; --only official"):
        prepared(puzzle_folder, tokenizer, "paper")


# -- Dialogues that end without a verdict, and one that raises what nobody expected --------------


BENCHMARK = SUITES["qa"].select(["bamboogle"])[0]


class Failing(Environment):
    """Ends every dialogue at once, without an engine."""

    def __init__(self, failing: set[int], error: Exception) -> None:
        super().__init__()
        self.failing, self.error = failing, error

    def begin(self, row, codec) -> Episode:
        return Ended(self, int(row["input"]))


class Ended:
    def __init__(self, environment: Failing, number: int) -> None:
        self.environment, self.number = environment, number

    def grade(self) -> Grade:
        if self.number in self.environment.failing:
            raise self.environment.error
        return Grade(reward=0.0, correct=False, format_ok=True, reason="wrong")


def run(out: Path, count: int, failing: set[int], error: Exception) -> int:
    """How many dialogues were stored."""
    questions = [Question(str(n), str(n), ["g"]) for n in range(count)]
    benchmark = replace(BENCHMARK, questions=questions)
    samples = samples_of([benchmark], lambda ps: [[1]] * len(ps), 1, 0)
    with Store(out) as store:
        try:
            made = functools.partial(Failing, failing, error)
            codec = CharacterCodec()
            asyncio.run(answer(samples, None, store, 0, made, codec))
        finally:
            path = out / "samples.jsonl"
            stored = path.read_text().count("\n") if path.exists() else 0
            (out / "stored").write_text(str(stored))
    return stored


def test_a_few_failures_of_many_do_not_stop_a_run(tmp_path: Path) -> None:
    failing = set(range(0, 3000, 100))
    with pytest.raises(EvalError, match="^30 of 3000 dialogues failed"):
        run(tmp_path / "out", 3000, failing, EpisodeAborted("no answer"))
    assert (tmp_path / "out" / "stored").read_text() == "2970"


def test_a_search_engine_that_is_gone_stops_it(tmp_path: Path) -> None:
    expected = r"^10 of the latest \d+ dialogues failed; the last: no answer$"
    with pytest.raises(EvalError, match=expected):
        run(tmp_path / "out", 3000, set(range(500, 3000)), EpisodeAborted("no answer"))
    assert 490 <= int((tmp_path / "out" / "stored").read_text()) <= 500


def test_an_unexpected_error_arrives_as_it_is_and_names_the_dialogue(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run(tmp_path / "out", 50, {7}, ZeroDivisionError("a bug"))
    text = "".join(traceback.format_exception(raised.value))
    assert "in the dialogue of bamboogle/7/0" in text and "ExceptionGroup" not in text
