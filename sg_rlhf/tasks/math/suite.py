"""`--suite math`: the five mathematics sets of Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.common.dataset_folder import sha256_of
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.math.paper import beside_the_paper
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.math.published import (
    EVAL_SETS,
    download_eval_set,
    find_eval_file,
    read_eval_set,
)
from sg_rlhf.tasks.questions import Question, Source, cache_folder
from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite

SAMPLED_16 = Sampling(temperature=1.0, max_tokens=4096, n=16)
GREEDY = Sampling(temperature=0.0, max_tokens=4096)


def questions(name: str, folder: Path | None) -> tuple[list[Question], list[Source]]:
    """One of the five sets.

    Raises:
        ValueError: the file is missing, another one than published, or cannot be downloaded.
    """
    eval_set = EVAL_SETS[name]
    if folder is None:
        folder = cache_folder()
        download_eval_set(eval_set, folder)
    rows = read_eval_set(name, folder)
    path = find_eval_file(eval_set, folder)
    found = [Question(row.id, prompt_of(row.problem), list(row.golds)) for row in rows]
    return found, [Source(path.name, sha256_of(path), len(rows))]


def _grade(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
    # The grader loads math-verify and starts processes; another suite's run needs neither.
    from sg_rlhf.tasks.math.grading import grade_many

    return grade_many(pairs)


def _benchmark(
    name: str, settings: Sampling, licence: str, pass_at: tuple[int, ...] = ()
) -> Benchmark:
    eval_set = EVAL_SETS[name]
    return Benchmark(
        name=name,
        family=name,
        title=eval_set.title,
        size=eval_set.rows,
        settings=settings,
        load=lambda folder: questions(name, folder),
        grade=_grade,
        licence=licence,
        pass_at=pass_at,
    )


SUITE = Suite(
    "math",
    "Mathematics (Table 1)",
    (
        _benchmark("olympiadbench", GREEDY, "Apache-2.0"),
        _benchmark("minerva", GREEDY, "not stated"),
        _benchmark("math500", GREEDY, "MIT"),
        _benchmark("amc", SAMPLED_16, "problems (c) MAA"),
        _benchmark("aime", SAMPLED_16, "problems (c) MAA", pass_at=(16,)),
    ),
    average=(
        ("olympiadbench", "accuracy"),
        ("minerva", "accuracy"),
        ("math500", "accuracy"),
        ("amc", "avg@16"),
        ("aime", "pass@16"),
        ("aime", "avg@16"),
    ),
    average_title="average of Table 1",
    beside_the_paper=beside_the_paper,
)
