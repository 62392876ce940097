"""`--suite arithmetic`: held-out sums as messages, as large as the trained ones and larger."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.tasks.arithmetic.data import generate
from sg_rlhf.tasks.arithmetic.domain import grade
from sg_rlhf.tasks.questions import Question, Source, generated_source
from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite, one_by_one

#: Seed of the held-out sums' order and of their shown examples.
SEED = 1
SETTINGS = Sampling(temperature=1.0, max_tokens=16, n=4)


def _benchmark(name: str, first: int, second: int, size: int) -> Benchmark:
    def load(_folder: Path | None) -> tuple[list[Question], list[Source]]:
        _, rows, _ = generate(0, size, SEED, first, second, shown=2, form="equation")
        questions = [
            Question(
                f"{name}-{number}", "", row["answer"], row["datasource"], messages=row["input"]
            )
            for number, row in enumerate(rows)
        ]
        source = f"generated first={first} second={second} seed={SEED}"
        return questions, [generated_source(source, questions)]

    return Benchmark(
        name=name,
        family=name,
        title=f"held-out sums to {first} + {second}, two shown, T=1",
        size=size,
        settings=SETTINGS,
        load=load,
        grade=one_by_one(grade),
        licence="ours",
    )


SUITE = Suite(
    "arithmetic",
    "Sums",
    (_benchmark("sums", 49, 9, 64), _benchmark("larger_sums", 99, 99, 200)),
)
