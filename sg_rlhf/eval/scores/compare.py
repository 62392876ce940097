"""Two finished evaluations of the same questions, compared question by question.

``sg-rlhf eval --compare A B`` reads the folders' `run.json` and `samples.jsonl`, never the
models. It refuses folders with different questions or settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sg_rlhf.eval.scores import metrics, paired
from sg_rlhf.eval.scores.metrics import Estimate
from sg_rlhf.eval.store import Row, differences, first_three, read_run
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Suite

#: Fields of a benchmark that must be equal. The sources of questions are in their hash.
_SAME = ("questions_sha256", "n_questions", "settings")
#: Fields of the run that must be equal: they decide an answer, or its grade, as the settings do.
_DECISIVE = ("search", "chat", "chat_template_kwargs", "reward")
#: Fields whose differences are reported: they change responses, not questions.
_NOTED = ("engine", "dtype", "seed", "context")
_WORDS = "{} in A, {} in B"


@dataclass(frozen=True)
class RunResults:
    """The stored run of one folder: both parts of its `run.json`, and samples by benchmark."""

    label: str  # in messages
    folder: Path
    request: Mapping[str, Any]
    begun: Mapping[str, Any]
    rows: Mapping[str, list[Row]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "model": self.request["model"],
            "commit": self.begun.get("commit"),
            "date": self.begun.get("date"),
        }


def compare(
    suites: Mapping[str, Suite],
    folders: tuple[Path, Path],
    only: Sequence[str],
    ks: Sequence[int] | None,
    seed: int,
) -> tuple[Suite, dict[str, Any]]:
    """Read, check and compare; the suite, and the content of `compare.json`.

    Without `only` all benchmarks that both have are compared, without `ks` the k that both report.
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
    names = selected(suite, known, names, only, "both folders")
    _check_same(a, b, names)
    benchmarks = [as_run(known[name], (a, b), ks) for name in names]
    if ks is not None and all(each.settings.n == 1 for each in benchmarks):
        raise EvalError(f"--k {','.join(map(str, ks))}: one response to each question in both")
    of_a, of_b = (
        {each.name: metrics.scores(each, side.rows[each.name], seed) for each in benchmarks}
        for side in (a, b)
    )
    means = [metrics.column_means(suite, scores) for scores in (of_a, of_b)]
    return suite, {
        "a": a.as_dict(),
        "b": b.as_dict(),
        "suite": suite.name,
        "difference": "b - a",
        "bootstrap_resamples": metrics.RESAMPLES,
        "notices": _notices(a, b, names, only),
        "means": {
            title: paired.difference(one, other)
            for (title, one), other in zip(means[0].items(), means[1].values(), strict=True)
            if one is not None and other is not None
        },
        "benchmarks": {
            each.name: _compared(each, a, b, of_a[each.name], of_b[each.name], seed)
            for each in benchmarks
        },
    }


def read_run_results(label: str, folder: Path) -> RunResults:
    """Read the finished run of a folder."""
    try:
        request, begun, rows = read_run(folder)
        asked = {
            name: part["n_questions"] * part["settings"]["n"]
            for name, part in request["benchmarks"].items()
        }
        by_benchmark: dict[str, list[Row]] = {name: [] for name in asked}
        for row in rows.values():
            by_benchmark[row["benchmark"]].append(row)
        request["model"]["name"], request["suite"]
    except (KeyError, TypeError, AttributeError) as error:
        raise EvalError(f"{folder}: damaged: {error} is not as an evaluation writes it") from None
    for name, samples in asked.items():
        if len(by_benchmark[name]) != samples:
            raise EvalError(
                f"{label} ({folder}): {len(by_benchmark[name])} of {samples} samples of {name} "
                "are there; finish that run with --resume first"
            )
    return RunResults(label, folder, request, begun, by_benchmark)


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
        return {**found, **{key: side.request.get(key) for key in _DECISIVE}}

    changed = differences(decisive(a), decisive(b), _WORDS)
    if changed:
        raise EvalError(f"--compare: different questions or settings: {first_three(changed)}")


def known_benchmarks(suite: Suite, side: RunResults) -> dict[str, Benchmark]:
    """The benchmarks of a suite by name, as a run has them."""
    known = {benchmark.name: benchmark for benchmark in suite.benchmarks}
    if suite.stored is not None:
        known = {name: suite.stored(name) for name in side.request["benchmarks"]}
    foreign = next((name for name in side.request["benchmarks"] if name not in known), None)
    if foreign is not None:
        raise EvalError(f"{side.folder}: benchmark {foreign} is not in suite {suite.name}")
    return known


def selected(
    suite: Suite,
    known: Mapping[str, Benchmark],
    names: Sequence[str],
    only: Sequence[str],
    where: str,
) -> list[str]:
    """The names of stored benchmarks that `--only` selects."""
    stored = replace(suite, benchmarks=tuple(known.values()))
    wanted = {benchmark.name for benchmark in stored.select(only)} if only else set(names)
    found = [name for name in names if name in wanted]
    if not found:
        raise EvalError(f"--only {','.join(only)}: not in {where}")
    return found


def as_run(known: Benchmark, sides: Sequence[RunResults], ks: Sequence[int] | None) -> Benchmark:
    """A benchmark with the settings that all these runs have; without `ks` the k of all."""
    described = [side.request["benchmarks"][known.name] for side in sides]
    settings = replace(known.settings, **described[0]["settings"])
    n = settings.n
    if ks is None:
        reported = [set(part.get("pass_at", known.pass_at)) for part in described]
        ks = sorted(set.intersection(*reported))
    elif n > 1 and max(ks) > n:
        raise EvalError(f"--k {','.join(map(str, ks))}: {known.name} has {n} samples of a question")
    return replace(known, settings=settings, pass_at=tuple(k for k in ks if 1 < n >= k))


def _compared(
    benchmark: Benchmark,
    a: RunResults,
    b: RunResults,
    of_a: Mapping[str, Estimate],
    of_b: Mapping[str, Estimate],
    seed: int,
) -> dict[str, Any]:
    """One benchmark's part of `compare.json`."""
    rows = a.rows[benchmark.name], b.rows[benchmark.name]
    groups_a, groups_b = (metrics.grouped_outcomes(benchmark, part) for part in rows)
    one, other = map(metrics.outcomes_of, rows)
    group_of = {row["id"]: row["group"] for row in rows[0]}
    discordant = [
        {"id": question, "group": group_of[question], "a": sum(flags), "b": sum(other[question])}
        for question, flags in one.items()
        if sum(flags) != sum(other[question])
    ]
    discordant.sort(key=lambda q: (-abs(q["b"] - q["a"]), q["id"]))
    return {
        "title": benchmark.title,
        "settings": benchmark.settings.as_dict(),
        "scores": {
            name: paired.difference(
                score, of_b[name], paired.p_value(benchmark, name, groups_a, groups_b, seed)
            )
            for name, score in of_a.items()
            # It ranks as the average does.
            if not name.startswith("bayes@")
        },
        "alike": len(one) - len(discordant),
        "a_better": [question for question in discordant if question["a"] > question["b"]],
        "b_better": [question for question in discordant if question["b"] > question["a"]],
    }


def _notices(a: RunResults, b: RunResults, names: Sequence[str], only: Sequence[str]) -> list[str]:
    def noted(side: RunResults) -> dict[str, Any]:
        asked = side.request["benchmarks"]
        return {
            **{key: side.request.get(key) for key in _NOTED},
            **{name: asked[name].get("context_cuts") for name in names},
            **{key: side.begun.get(key) for key in ("commit", "versions")},
        }

    notices = []
    if a.request["model"].get("fingerprint") == b.request["model"].get("fingerprint"):
        notices.append("Both folders are of the same model: differences are chance or rounding.")
    for side, other in ((a, b), (b, a)):
        there = other.request["benchmarks"]
        alone = [name for name in side.request["benchmarks"] if name not in there]
        if alone and not only:
            notices.append(f"Only in {side.label}, and left out: {', '.join(alone)}.")
    noted_differences = differences(noted(a), noted(b), _WORDS)
    return notices + [f"Also different: {phrase}." for phrase in noted_differences]
