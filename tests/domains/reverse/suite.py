"""`python -m eval.run --suite reverse`."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.tasks.questions import Question, Source, generated_source
from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite, one_by_one
from tests.domains.reverse.domain import grade, rows

SIZE = 24


def questions(_folder: Path | None) -> tuple[list[Question], list[Source]]:
    found = [
        Question(f"reverse-{number}", row.prompt, row.answer, str(len(row.letters)))
        for number, row in enumerate(rows(SIZE, 1, held_out=True))
    ]
    return found, [generated_source("generated seed=1", found)]


SUITE = Suite(
    "reverse",
    "Reverse",
    (
        Benchmark(
            name="reverse",
            family="reverse",
            title="letters in the reverse order, greedy",
            size=SIZE,
            settings=Sampling(temperature=0.0, max_tokens=16),
            load=questions,
            grade=one_by_one(grade),
            licence="ours",
        ),
    ),
)
