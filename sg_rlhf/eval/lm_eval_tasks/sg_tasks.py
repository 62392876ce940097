"""Our suites as tasks of lm-evaluation-harness: the same questions, prompts and graders.

``lm_eval run --include_path sg_rlhf/eval/lm_eval_tasks --tasks sg_aime --model vllm --model_args ...``
with `SG_EVAL_DATA` naming the folder that `--data-dir` would (else the files are downloaded). The
harness sets the sampling of a task from its YAML file; `tests/unit/eval` holds those to
the suites' own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from sg_rlhf.eval.metrics import pass_at_k
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.suite import Benchmark


def benchmark(name: str) -> Benchmark:
    """The benchmark of a name, whichever suite holds it."""
    return next(b for suite in SUITES.values() for b in suite.benchmarks if b.name == name)


def load(benchmark_name: str, **_: Any) -> DatasetDict:
    """The questions as the split "test"; lm-eval passes `metadata` and `dataset_kwargs`."""
    folder = os.environ.get("SG_EVAL_DATA")
    questions, _sources = benchmark(benchmark_name).load(Path(folder) if folder else None)
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
    """A filter that keeps every one of `repeats` responses; lm-eval's own keeps the first."""
    return [list(responses) for responses in resps]


def grade(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
    """Scores of one question: the mean over its responses, and pass@k where the suite has it."""
    asked = benchmark(doc["benchmark"])
    responses = results[0]
    grades = asked.grade([(response, doc["gold"]) for response in responses])
    right = sum(grade.correct for grade in grades)
    scores = {"score": right / len(responses)}
    for k in asked.pass_at:
        scores[f"pass_at_{k}"] = pass_at_k(len(responses), right, k)
    return scores
