"""Knights & Knaves are asked in the form of the model that answers, and end with its turn."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sg_rlhf.eval.generation import requests
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.kk.prompt import SYSTEM, build_prompt
from sg_rlhf.tasks.kk.suite import SUITE
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import EvalPlan
from tests.unit.families import FAMILIES


def prepared(folder: Path, tokenizer: Any, *only: str) -> EvalPlan:
    args = argparse.Namespace(data_dir=folder, limit=7, seed=0)
    with ExitStack() as resources:
        return SUITE.prepare(SUITE.select(only), args, lambda: tokenizer, resources)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_in_the_models_form_with_one_bos(
    puzzle_folder: Path, tmp_path: Path, name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FAMILIES[name].write(tmp_path))
    loaded = prepared(puzzle_folder, tokenizer).loaded
    tasks = requests.prepare_benchmarks(
        loaded, lambda prompts: chat.encode(prompts, tokenizer), None
    )
    turn_end = tokenizer.convert_tokens_to_ids(FAMILIES[name].turn_end)
    for task in tasks:
        raw = task.benchmark.family == "official"
        for question in task.questions:
            assert raw or (
                SYSTEM.strip() in question.prompt and question.prompt.endswith("<think>")
            )
            assert chat.supports(question.prompt, tokenizer)
        for ids in task.prompt_ids:
            assert ids.count(tokenizer.bos_token_id) == (FAMILIES[name].bos is not None)
    for sample in requests.pending_samples(tasks, 0, known_ids=True, tokenizer=tokenizer):
        raw = sample.task.benchmark.family == "official"
        assert sample.request.stop_ids == (() if raw else (turn_end,))


def test_a_model_that_knows_chatml_gets_the_papers_prompt_whatever_its_template(
    puzzle_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FAMILIES["qwen2.5-base"].write(tmp_path))
    tokenizer.chat_template = None
    by_server = prepared(puzzle_folder, None, "paper").loaded
    assert prepared(puzzle_folder, tokenizer, "paper").loaded == by_server
    start = build_prompt("").partition("<|im_end|>")[0]
    assert all(q.prompt.startswith(start) for q in by_server[0].questions)


def test_a_model_without_any_chat_form_is_refused_but_for_the_plain_harness(
    puzzle_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FAMILIES["mistral-v0.3"].write(tmp_path))
    tokenizer.chat_template = None
    assert prepared(puzzle_folder, tokenizer, "official").loaded
    with pytest.raises(EvalError, match="neither ChatML nor a chat template; --only official"):
        prepared(puzzle_folder, tokenizer, "paper")
