"""Two finished evaluations of the same questions, compared question by question.

``sg-rlhf eval --compare A B`` reads the folders' `run.json` and `samples.jsonl`, never the
models. It refuses folders with different questions or settings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sg_rlhf.eval.scores import metrics, paired
from sg_rlhf.eval.scores.paired import Difference
from sg_rlhf.eval.store import Row, differences, read_results, read_run
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Suite

#: Fields of a benchmark that must be equal. The sources of questions are in their hash.
_SAME = ("questions_sha256", "n_questions", "settings")
#: Fields whose differences are reported: they change responses, not questions.
_NOTED = ("engine", "dtype", "seed", "context")


@dataclass(frozen=True)
class RunResults:
    """The stored run of one folder.

    Attributes:
        label: how messages name it.
        request: the request in its `run.json`.
        begun: date, versions and commit of its first start.
        rows: samples by benchmark.
        reported: names of the scores in its `results.json`, by benchmark; empty without one.
    """

    label: str
    folder: Path
    request: Mapping[str, Any]
    begun: Mapping[str, Any]
    rows: Mapping[str, list[Row]]
    reported: Mapping[str, set[str]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "folder": str(self.folder),
            "model": self.request["model"],
            "commit": self.begun.get("commit"),
            "date": self.begun.get("date"),
        }


@dataclass(frozen=True)
class Discordant:
    """A question with different numbers of correct responses in A and B."""

    id: str
    group: str
    a: int
    b: int


@dataclass(frozen=True)
class BenchmarkComparison:
    """Scores of A and B, the questions that differ, and how many do not."""

    benchmark: Benchmark
    scores: Mapping[str, Difference]
    discordant: Sequence[Discordant]
    concordant: int

    @property
    def wins_a(self) -> list[Discordant]:
        """Questions that A answers better."""
        return [question for question in self.discordant if question.a > question.b]

    @property
    def wins_b(self) -> list[Discordant]:
        """Questions that B answers better."""
        return [question for question in self.discordant if question.b > question.a]


@dataclass(frozen=True)
class Comparison:
    """The comparison of two folders.

    Attributes:
        means: the suite's averages over benchmarks, by title, where both folders have all of them.
        notices: what else differs.
    """

    suite: Suite
    a: RunResults
    b: RunResults
    benchmarks: Sequence[BenchmarkComparison]
    means: Mapping[str, Difference]
    notices: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "a": self.a.as_dict(),
            "b": self.b.as_dict(),
            "suite": self.suite.name,
            "difference": "b - a",
            "bootstrap_resamples": metrics.RESAMPLES,
            "notices": list(self.notices),
            "means": {title: found.as_dict() for title, found in self.means.items()},
            "benchmarks": {
                each.benchmark.name: {
                    "title": each.benchmark.title,
                    "settings": each.benchmark.settings.as_dict(),
                    "scores": {name: found.as_dict() for name, found in each.scores.items()},
                    "alike": each.concordant,
                    "a_better": [vars(question) for question in each.wins_a],
                    "b_better": [vars(question) for question in each.wins_b],
                }
                for each in self.benchmarks
            },
        }


def compare(
    suites: Mapping[str, Suite],
    folders: tuple[Path, Path],
    only: Sequence[str],
    ks: Sequence[int] | None,
    seed: int,
) -> Comparison:
    """Read, check and compare.

    Args:
        suites: all that there are, by name.
        only: benchmarks or families; empty: all that both folders have.
        ks: of pass@k; None: those that both results have.
        seed: of the bootstrap.
    """
    a, b = (read_run_results(label, folder) for label, folder in zip("AB", folders, strict=True))
    suite = _suite(suites, a, b)
    known = known_benchmarks(suite, a) | known_benchmarks(suite, b)
    names = [name for name in a.request["benchmarks"] if name in b.request["benchmarks"]]
    if not names:
        raise EvalError(
            f"--compare: no benchmark in common: A has {', '.join(a.request['benchmarks'])}, "
            f"B has {', '.join(b.request['benchmarks'])}"
        )
    if only:
        selected = {benchmark.name for benchmark in suite.select(only)}
        names = [name for name in names if name in selected]
        if not names:
            raise EvalError(f"--only {','.join(only)}: not in both folders")
    _check_same(a, b, names)
    found = []
    for name in names:
        both = a.reported.get(name, set()) & b.reported.get(name, set())
        found.append(_compared(as_run(known[name], a, ks, both), a, b, seed))
    if ks is not None and all(each.benchmark.settings.n == 1 for each in found):
        raise EvalError(f"--k {','.join(map(str, ks))}: one response to each question in both")
    scores = {each.benchmark.name: each.scores for each in found}
    means = metrics.column_means(suite, scores, paired.mean_of)
    present = {title: mean for title, mean in means.items() if mean is not None}
    return Comparison(suite, a, b, found, present, _notices(a, b, names, only))


def read_run_results(label: str, folder: Path) -> RunResults:
    """Read the finished run of a folder."""
    request, begun, rows = read_run(folder)
    try:
        asked = {
            name: part["n_questions"] * part["settings"]["n"]
            for name, part in request["benchmarks"].items()
        }
        by_benchmark: dict[str, list[Row]] = {name: [] for name in asked}
        for row in rows.values():
            by_benchmark[row["benchmark"]].append(row)
        request["model"]["name"], request["suite"]
        reported = {
            name: set(part["scores"])
            for name, part in read_results(folder).get("benchmarks", {}).items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise EvalError(f"{folder}: damaged: {error} is not as an evaluation writes it") from None
    for name, samples in asked.items():
        if len(by_benchmark[name]) != samples:
            raise EvalError(
                f"{label} ({folder}): {len(by_benchmark[name])} of {samples} samples of {name} "
                "are there; finish that run with --resume first"
            )
    return RunResults(label, folder, request, begun, by_benchmark, reported)


def _suite(suites: Mapping[str, Suite], a: RunResults, b: RunResults) -> Suite:
    names = (a.request["suite"], b.request["suite"])
    if names[0] != names[1]:
        raise EvalError(f"--compare: suite {names[0]} in A, {names[1]} in B; expected the same")
    suite = next((suite for suite in suites.values() if suite.name == names[0]), None)
    if suite is None:
        raise EvalError(
            f"--compare: suite {names[0]} is not known here, expected one of {', '.join(suites)}; "
            "--suite package.module:DOMAIN names another domain's"
        )
    return suite


def _check_same(a: RunResults, b: RunResults, names: Sequence[str]) -> None:
    def decisive(side: RunResults) -> dict[str, Any]:
        asked = side.request["benchmarks"]
        found: dict[str, Any] = {
            name: {key: asked[name].get(key) for key in _SAME} for name in names
        }
        # These decide an answer, or its grade, as the settings do.
        also = ("search", "chat", "chat_template_kwargs", "reward")
        return {**found, **{key: side.request.get(key) for key in also}}

    changed = differences(decisive(a), decisive(b), "{} in A, {} in B")
    if changed:
        shown = "; ".join(changed[:3]) + (f"; {len(changed) - 3} more" if changed[3:] else "")
        raise EvalError(f"--compare: different questions or settings: {shown}")
    for name in names:
        ids = [{(row["id"], row["sample"]) for row in side.rows[name]} for side in (a, b)]
        if ids[0] != ids[1]:
            odd = min(ids[0] ^ ids[1])
            raise EvalError(f"--compare: {name}: sample {odd} is in one folder alone")


def known_benchmarks(suite: Suite, side: RunResults) -> dict[str, Benchmark]:
    """The benchmarks of a suite by name, as a run has them."""
    known = {benchmark.name: benchmark for benchmark in suite.benchmarks}
    if suite.stored is not None:
        known = {name: suite.stored(name) for name in side.request["benchmarks"]}
    foreign = next((name for name in side.request["benchmarks"] if name not in known), None)
    if foreign is not None:
        raise EvalError(f"{side.folder}: benchmark {foreign} is not in suite {suite.name}")
    return known


def as_run(
    known: Benchmark, side: RunResults, ks: Sequence[int] | None, reported: Collection[str]
) -> Benchmark:
    """A benchmark with the settings of a run.

    Args:
        ks: the k of pass@k, of `--k`; None: those that were reported.
        reported: names of its scores in `results.json`.
    """
    settings = replace(known.settings, **side.request["benchmarks"][known.name]["settings"])
    n = settings.n
    if ks is None:
        found = (re.fullmatch(r"pass@(\d+)", score) for score in reported)
        ks = sorted(int(match[1]) for match in found if match)
    elif n > 1 and max(ks) > n:
        raise EvalError(f"--k {','.join(map(str, ks))}: {known.name} has {n} samples of a question")
    return replace(known, settings=settings, pass_at=tuple(k for k in ks if 1 < n >= k))


def _compared(benchmark: Benchmark, a: RunResults, b: RunResults, seed: int) -> BenchmarkComparison:
    rows = (a.rows[benchmark.name], b.rows[benchmark.name])
    one, other = (metrics.outcomes_of(part) for part in rows)
    group_of = {row["id"]: row["group"] for row in rows[0]}
    discordant = [
        Discordant(question, group_of[question], sum(flags), sum(other[question]))
        for question, flags in one.items()
        if sum(flags) != sum(other[question])
    ]
    discordant.sort(key=lambda q: (q.b > q.a, -abs(q.b - q.a), q.id))
    return BenchmarkComparison(
        benchmark,
        paired.differences(
            benchmark,
            metrics.grouped_outcomes(benchmark, rows[0]),
            metrics.grouped_outcomes(benchmark, rows[1]),
            seed,
        ),
        discordant,
        len(one) - len(discordant),
    )


def _notices(a: RunResults, b: RunResults, names: Sequence[str], only: Sequence[str]) -> list[str]:
    one, other = a.request, b.request
    notices = []
    if one["model"].get("fingerprint") == other["model"].get("fingerprint"):
        notices.append("Both folders are of the same model: differences are chance or rounding.")
    for side, others in ((a, other), (b, one)):
        alone = [name for name in side.request["benchmarks"] if name not in others["benchmarks"]]
        if alone and not only:
            notices.append(f"Only in {side.label}, and left out: {', '.join(alone)}.")
    noted = differences(
        {key: one.get(key) for key in _NOTED},
        {key: other.get(key) for key in _NOTED},
        "{} in A, {} in B",
    )
    noted += differences(
        {name: one["benchmarks"][name].get("context_cuts") for name in names},
        {name: other["benchmarks"][name].get("context_cuts") for name in names},
        "{} in A, {} in B",
    )
    noted += differences(
        {"commit": a.begun.get("commit"), "versions": a.begun.get("versions")},
        {"commit": b.begun.get("commit"), "versions": b.begun.get("versions")},
        "{} in A, {} in B",
    )
    notices += [f"Also different: {phrase}." for phrase in noted]
    return notices
