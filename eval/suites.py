"""The suites: what is asked, under which settings, and who grades. Adding one is an entry here.

A benchmark is a set of questions under one setting. Where a data set is scored under several
settings (Knights & Knaves), each is a benchmark of its own: responses made under one setting are
never graded as if they had been made under another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval import data, kk_harnesses, qa
from eval.questions import EvalError, Grader, Question, Settings, Verdict
from sg_rlhf.tasks.math import published as math_data

SAMPLED_16 = Settings(temperature=1.0, max_tokens=4096, n=16)
GREEDY = Settings(temperature=0.0, max_tokens=4096)


@dataclass(frozen=True)
class Benchmark:
    """Questions under one setting, with their grader.

    Attributes:
        name: as `--only` takes it.
        family: `--only FAMILY` selects all benchmarks that share it.
        title: as in the tables.
        size: number of questions of the whole set; another number is an error, unless `samples`.
        settings: how responses are sampled.
        load: folder with the data -> questions and where they are from.
        grade: (response, gold) pairs -> verdicts, in order.
        licence: of the questions.
        pass_at: the k of pass@k that are reported beside the mean over samples.
        headline_groups: groups whose scores are averaged into the benchmark's score; empty means
            one mean over all questions.
        metric: name of the mean over questions, where there is one response to each.
        samples: a file may be a sample of the set, which is then reported as one, and a limit
            draws questions at random instead of taking the first.
    """

    name: str
    family: str
    title: str
    size: int
    settings: Settings
    load: Callable[[Path | None], tuple[list[Question], list[data.Source]]]
    grade: Grader
    licence: str
    pass_at: tuple[int, ...] = ()
    headline_groups: tuple[str, ...] = ()
    metric: str = "accuracy"
    samples: bool = False

    @property
    def mean_name(self) -> str:
        """Name of the mean over samples: the metric's, or `avg@n` for several samples."""
        return self.metric if self.settings.n == 1 else f"avg@{self.settings.n}"


@dataclass(frozen=True)
class Suite:
    """Benchmarks that are reported together.

    Attributes:
        average: (benchmark, score) columns whose mean is the paper's average; empty where every
            benchmark has a mean of its own.
        average_title: what the tables call it.
        groups: further means over columns by title, each given where all its columns were run.
    """

    name: str
    title: str
    benchmarks: tuple[Benchmark, ...]
    average: tuple[tuple[str, str], ...] = ()
    average_title: str = ""
    groups: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def select(self, only: Sequence[str]) -> tuple[Benchmark, ...]:
        """The benchmarks named (by name or family), in the suite's order; all where none is.

        Raises:
            EvalError: a name is unknown; says which there are.
        """
        known = {b.name for b in self.benchmarks} | {b.family for b in self.benchmarks}
        for name in only:
            if name not in known:
                raise EvalError(
                    f"--only {name}: not in suite {self.name}, "
                    f"expected one of {', '.join(sorted(known))}"
                )
        return tuple(b for b in self.benchmarks if not only or {b.name, b.family} & set(only))


def _grade_math(pairs: Sequence[tuple[str, Any]]) -> list[Verdict]:
    # The grader loads math-verify and starts processes; a K&K run needs neither.
    from sg_rlhf.tasks.math.grading import grade_many

    grades = grade_many(pairs)
    return [Verdict(g.correct, g.extracted, str(g.reason)) for g in grades]


def _math(name: str, settings: Settings, licence: str, pass_at: tuple[int, ...] = ()) -> Benchmark:
    eval_set = math_data.EVAL_SETS[name]
    return Benchmark(
        name=name,
        family=name,
        title=eval_set.title,
        size=eval_set.rows,
        settings=settings,
        load=lambda folder: data.math_questions(name, folder),
        grade=_grade_math,
        licence=licence,
        pass_at=pass_at,
    )


def _kk(name: str, family: str, title: str, settings: Settings, harness: str) -> Benchmark:
    return Benchmark(
        name=name,
        family=family,
        title=title,
        size=data.KK_PER_SIZE * len(data.KK_SIZES),
        settings=settings,
        load=lambda folder: data.kk_questions(kk_harnesses.PROMPTS[harness], folder),
        grade=kk_harnesses.GRADERS[harness],
        licence="CC-BY-NC-SA-4.0; generated sizes are ours",
        headline_groups=tuple(str(size) for size in data.KK_TRAINED_SIZES),
    )


def _qa(qa_set: qa.QaSet) -> Benchmark:
    return Benchmark(
        name=qa_set.name,
        family=qa_set.family,
        title=qa_set.title,
        size=qa_set.size,
        settings=Settings(temperature=0.0, max_tokens=qa.DIALOGUE_TOKENS),
        load=lambda folder: qa.questions(qa_set, folder),
        grade=qa.grade,
        licence=qa_set.licence,
        metric="exact match",
        samples=True,
    )


def _exact_matches(*families: str) -> tuple[tuple[str, str], ...]:
    return tuple((s.name, "exact match") for s in qa.SETS if s.family in families)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "math",
            "Mathematics (Table 1)",
            (
                _math("olympiadbench", GREEDY, "Apache-2.0"),
                _math("minerva", GREEDY, "not stated"),
                _math("math500", GREEDY, "MIT"),
                _math("amc", SAMPLED_16, "problems (c) MAA"),
                _math("aime", SAMPLED_16, "problems (c) MAA", pass_at=(16,)),
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
        ),
        Suite(
            "kk",
            "Knights & Knaves (Tables 3, 7, 8)",
            (
                _kk(
                    "official", "official", "K&K official harness, greedy",
                    Settings(temperature=0.0, max_tokens=2048), "official",
                ),
                _kk(
                    "logic_rl", "logic_rl", "Logic-RL harness, T=1",
                    Settings(temperature=1.0, max_tokens=8192), "logic_rl",
                ),
                _kk(
                    "paper_greedy", "paper", "reward +3, greedy",
                    Settings(temperature=0.0, max_tokens=4096), "paper",
                ),
                _kk(
                    "paper_t1", "paper", "reward +3, T=1",
                    Settings(temperature=1.0, max_tokens=4096), "paper",
                ),
            ),
        ),
        Suite(
            "qa",
            "Search question answering (Table 2)",
            tuple(_qa(qa_set) for qa_set in qa.SETS),
            average=_exact_matches(qa.GENERAL, qa.MULTI_HOP),
            average_title="average of Table 2",
            groups={
                "General": _exact_matches(qa.GENERAL),
                "Multi-hop": _exact_matches(qa.MULTI_HOP),
            },
        ),
    )
}  # fmt: skip
