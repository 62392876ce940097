"""``python -m tests.integration.toy_suite --suite toy ...``: `eval.run` with one suite more.

Puzzles of our own, four samples each, so that pass@k is resumed too without any published data.
With ``TOY_HOLDS_AT=N FILE`` it waits to be killed once N answers are stored in FILE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from sg_rlhf.eval.run import main
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.kk.harnesses import grade_paper
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import generate
from sg_rlhf.tasks.questions import Question, Source, generated_source
from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite, one_by_one


def questions(_folder: Path | None) -> tuple[list[Question], list[Source]]:
    found = [
        Question(
            f"toy-{size}-{number}",
            build_prompt(puzzle.quiz),
            puzzle.solution_text_format,
        )
        for size in (2, 3)
        for number, puzzle in enumerate(generate(size, 12, seed=3))
    ]
    return found, [generated_source("generated", found)]


def grade(response: str, gold: str) -> Grade:
    stored, _, file = os.environ.get("TOY_HOLDS_AT", "").partition(" ")
    samples = Path(file)
    if samples.is_file() and samples.read_bytes().count(b"\n") >= int(stored):
        time.sleep(3600)
    return grade_paper(response, gold)


def benchmark(name: str, settings: Sampling, pass_at: tuple[int, ...]) -> Benchmark:
    return Benchmark(
        name=name,
        family=name,
        title=name,
        size=24,
        settings=settings,
        load=questions,
        grade=one_by_one(grade),
        licence="ours",
        pass_at=pass_at,
    )


SUITES["toy"] = Suite(
    "toy",
    "Toy",
    (
        benchmark("sampled", Sampling(temperature=1.0, max_tokens=256, n=4), (2, 4)),
        benchmark("nucleus", Sampling(temperature=0.7, max_tokens=200, n=2, top_p=0.9), ()),
        benchmark("greedy", Sampling(temperature=0.0, max_tokens=256), ()),
    ),
)

if __name__ == "__main__":
    raise SystemExit(main())
