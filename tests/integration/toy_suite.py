"""``python -m tests.integration.toy_suite --suite toy ...``: `eval.run` with one suite more.

Puzzles of our own, four samples each, so that pass@k is resumed too without any published data.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from eval import data, kk_harnesses
from eval.questions import Question, Settings
from eval.run import main
from eval.suites import SUITES, Benchmark, Suite
from sg_rlhf.tasks.kk.puzzle import generate


def questions(_folder: Path | None) -> tuple[list[Question], list[data.Source]]:
    found = [
        Question(
            f"toy-{size}-{number}",
            kk_harnesses.PROMPTS["paper"](puzzle.quiz),
            puzzle.solution_text_format,
        )
        for size in (2, 3)
        for number, puzzle in enumerate(generate(size, 12, seed=3))
    ]
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    return found, [data.Source("generated", digest, len(found))]


def benchmark(name: str, settings: Settings, pass_at: tuple[int, ...]) -> Benchmark:
    return Benchmark(
        name=name,
        family=name,
        title=name,
        size=24,
        settings=settings,
        load=questions,
        grade=kk_harnesses.GRADERS["paper"],
        licence="ours",
        pass_at=pass_at,
    )


SUITES["toy"] = Suite(
    "toy",
    "Toy",
    (
        benchmark("sampled", Settings(temperature=1.0, max_tokens=256, n=4), (2, 4)),
        benchmark("nucleus", Settings(temperature=0.7, max_tokens=200, n=2, top_p=0.9), ()),
        benchmark("greedy", Settings(temperature=0.0, max_tokens=256), ()),
    ),
)

if __name__ == "__main__":
    raise SystemExit(main())
