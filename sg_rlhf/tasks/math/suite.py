"""`--suite math`: the five mathematics sets of Table 1, and sets that are newer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.math.data import read_rows
from sg_rlhf.tasks.math.paper import beside_the_paper
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.math.sets.contamination import EXPOSURE
from sg_rlhf.tasks.math.sets.published import (
    all_eval_sets,
    download_eval_set,
    find_eval_file,
    read_eval_set,
)
from sg_rlhf.tasks.overlap import NGRAM
from sg_rlhf.tasks.questions import EvalError, Question, Source, cache_folder, check_online
from sg_rlhf.tasks.suite import (
    OURS,
    BatchGrader,
    Benchmark,
    Prepared,
    Sampling,
    Setup,
    Suite,
    prepare_questions,
)

SAMPLED_16 = Sampling(temperature=1.0, max_tokens=4096, n=16)
#: For a set of 400 problems.
SAMPLED_4 = Sampling(temperature=1.0, max_tokens=4096, n=4)
GREEDY = Sampling(temperature=0.0, max_tokens=4096)

#: `--only more`: the sets that are not in the paper.
MORE = "more"


def questions(name: str, folder: Path | None) -> tuple[list[Question], list[Source]]:
    """One of the sets; downloads it if no folder is given."""
    eval_set = all_eval_sets()[name]
    if folder is None:
        folder = cache_folder()
        if find_eval_file(eval_set, folder) is None:
            check_online(folder / eval_set.file)
            download_eval_set(eval_set, folder)
    rows = read_eval_set(name, folder)
    path = find_eval_file(eval_set, folder)
    assert path is not None
    found = [
        Question(row.id, prompt_of(row.problem), list(row.golds), bare=row.problem) for row in rows
    ]
    return found, [Source(path.name, eval_set.sha256 or sha256_of(path), len(rows))]


def _grade(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
    # The grader loads math-verify and starts processes; another suite's run needs neither.
    from sg_rlhf.tasks.math.grading import grade_many

    return grade_many(pairs)


def _benchmark(
    name: str,
    settings: Sampling,
    licence: str,
    pass_at: tuple[int, ...] = (),
    family: str | None = None,
) -> Benchmark:
    eval_set = all_eval_sets()[name]
    return Benchmark(
        name=name,
        family=family or name,
        title=eval_set.title,
        size=eval_set.rows,
        settings=settings,
        load=lambda folder: questions(name, folder),
        grade=_grade,
        licence=licence,
        pass_at=pass_at,
        exposure=EXPOSURE[name],
    )


def grader_names(text: str) -> tuple[str, ...]:
    """The graders of `--grader A,B` beside ours."""
    from sg_rlhf.tasks.math.reference_graders import GRADERS

    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in (OURS, *GRADERS):
            raise EvalError(
                f"--grader {name}: expected one or more of {', '.join((OURS, *GRADERS))}"
            )
    return tuple(name for name in names if name != OURS)


def prepare(setup: Setup) -> Prepared:
    """Read the questions, and start the graders of `--grader`.

    Their verdicts are reported beside ours, which decides all other scores.
    """
    names, folder = grader_names(setup.options["grader"]), setup.options["grader_sources"]
    if folder is not None and not names:
        raise EvalError("--grader-sources: only with --grader")
    if folder is not None and not folder.is_dir():
        raise EvalError(f"--grader-sources {folder}: no such folder")
    prepared = prepare_questions(setup)
    if not names:
        return prepared
    from sg_rlhf.tasks.math.reference_graders import GRADERS, ReferenceGraders, find_sources

    try:
        sources = find_sources(names, folder)
    except ValueError as error:
        raise EvalError(str(error)) from None
    others = ReferenceGraders(sources)
    setup.resources.callback(others.close)

    def also(grade: BatchGrader) -> BatchGrader:
        def grade_many(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
            graded = zip(grade(pairs), others.grade(pairs), strict=True)
            return [replace(ours, others=verdicts) for ours, verdicts in graded]

        return grade_many

    changed = [replace(b, grade=also(b.grade)) for b in prepared.benchmarks]
    return Prepared(changed, {"graders": {name: GRADERS[name].identity() for name in names}})


OPTIONS: dict[str, dict[str, Any]] = {
    "--grader": {
        "metavar": "A,B",
        "default": OURS,
        "help": "other graders for the same responses: math_verify, hendrycks, deepscaler, qwen, "
        "verl (default: none)",
    },
    "--grader-sources": {
        "metavar": "D",
        "type": Path,
        "help": "folder with the source files of these graders as OWNER/REPOSITORY/PATH (default: "
        "download them)",
    },
}

SUITE = Suite(
    "math",
    "Mathematics (Table 1)",
    (
        _benchmark("olympiadbench", GREEDY, "Apache-2.0"),
        _benchmark("minerva", GREEDY, "not stated"),
        _benchmark("math500", GREEDY, "MIT"),
        _benchmark("amc", SAMPLED_16, "problems (c) MAA"),
        _benchmark("aime", SAMPLED_16, "problems (c) MAA", (16,)),
        _benchmark("aime25", SAMPLED_16, "problems (c) MAA", (16,), MORE),
        _benchmark("aime26", SAMPLED_16, "problems (c) MAA", (16,), MORE),
        _benchmark("hmmt25", SAMPLED_16, "problems (c) HMMT", (16,), MORE),
        _benchmark("hmmt25_nov", SAMPLED_16, "CC-BY-NC-SA-4.0", (16,), MORE),
        _benchmark("hmmt26", SAMPLED_16, "CC-BY-NC-SA-4.0", (16,), MORE),
        _benchmark("amc23", SAMPLED_16, "problems (c) MAA", (16,), MORE),
        _benchmark("imo_answerbench", SAMPLED_4, "CC-BY-4.0", (4,), MORE),
    ),
    by_default=("olympiadbench", "minerva", "math500", "amc", "aime"),
    average=(
        ("olympiadbench", "accuracy"),
        ("minerva", "accuracy"),
        ("math500", "accuracy"),
        ("amc", "avg@16"),
        ("aime", "pass@16"),
        ("aime", "avg@16"),
    ),
    average_title="average of Table 1",
    options=OPTIONS,
    prepare=prepare,
    training_problems=functools.partial(read_rows, allow_empty=True),
    beside_the_paper=beside_the_paper,
    shared_runs=NGRAM,
)
