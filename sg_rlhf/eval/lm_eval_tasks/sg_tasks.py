"""Our suites as tasks of lm-evaluation-harness: the same questions, prompts and graders.

``lm_eval run --include_path sg_rlhf/eval/lm_eval_tasks --tasks sg_aime --model vllm ...``

`SG_EVAL_DATA` names the folder with the data files, as `--data-dir` does; without it they are
downloaded. The harness takes the sampling settings from the YAML files. `tests/unit/eval` compares
them with the suites' own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from sg_rlhf.eval.scores.metrics import pass_at_k
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.suite import Benchmark, with_messages_written


def benchmark(name: str) -> Benchmark:
    """The benchmark with this name, of any suite."""
    return next(b for suite in SUITES.values() for b in suite.benchmarks if b.name == name)


def load(benchmark_name: str, **given: Any) -> DatasetDict:
    """The questions as the split "test".

    Args:
        given: `--model_args` and `--metadata`. Questions that are messages are written with the
            chat template of `tokenizer`, else of `pretrained`.
    """
    folder, of_suite = os.environ.get("SG_EVAL_DATA"), benchmark(benchmark_name)
    questions, _ = of_suite.load(Path(folder) if folder else None)
    if any(question.messages for question in questions):
        from transformers import AutoTokenizer

        model = given.get("tokenizer") or given.get("pretrained")
        if model is None:
            raise ValueError(
                f"sg_{benchmark_name}: its questions are messages: name the model whose chat "
                "template writes them, --model_args pretrained=MODEL or tokenizer=MODEL"
            )
        loaded = [replace(of_suite, questions=questions)]
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        (written,) = with_messages_written(loaded, tokenizer)
        questions = list(written.questions)
    rows = [
        {
            "benchmark": benchmark_name,
            "id": question.id,
            "prompt": question.prompt,
            "gold": question.gold,
            "group": question.group,
        }
        for question in questions
    ]
    return DatasetDict({"test": Dataset.from_list(rows)})


def keep_all(resps: Iterable[list[str]], docs: Any) -> list[list[str]]:
    """A filter that keeps all `repeats` responses; the harness's own keeps the first."""
    return [list(responses) for responses in resps]


def grade(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
    """Scores of one question: the mean over its responses, and pass@k if the suite has it."""
    of_suite = benchmark(doc["benchmark"])
    responses = results[0]
    grades = of_suite.grade([(response, doc["gold"]) for response in responses])
    n_correct = sum(grade.correct for grade in grades)
    scores = {"score": n_correct / len(responses)}
    for k in of_suite.pass_at:
        scores[f"pass_at_{k}"] = pass_at_k(len(responses), n_correct, k)
    return scores
