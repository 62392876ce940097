"""Scores from graded samples: means, pass@k and Bayes@N, with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sg_rlhf.tasks.questions import sample_seed
from sg_rlhf.tasks.suite import Benchmark, Suite

RESAMPLES = 10_000
#: Counts that are held at once, of 8 bytes, and once more as they are multiplied.
BLOCK = 2**21

Array: TypeAlias = NDArray[np.float64]
#: Question id -> whether each of its samples is right.
Outcomes: TypeAlias = Mapping[str, Sequence[bool]]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is right (arXiv 2107.03374).

    `1 - C(n - c, k) / C(n, k)` for c right among n samples.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples and k >= 1, got {n}")
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} right among {n} samples, expected 0 to {n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


@dataclass(frozen=True)
class Estimate:
    """A score (a share in [0, 1]) with draws of it: bootstrap resamples, or posterior draws."""

    value: float
    draws: Array
    n_questions: int

    @property
    def interval(self) -> tuple[float, float]:
        """The central 95 % of the draws."""
        low, high = np.quantile(self.draws, (0.025, 0.975))
        return float(low), float(high)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: value, interval and number of questions."""
        low, high = self.interval
        return {"value": self.value, "ci95": [low, high], "n_questions": self.n_questions}


def estimate(per_question: Sequence[float], seed: int) -> Estimate:
    """Mean over questions, with a bootstrap over questions.

    Equal seeds and sizes give the same resamples, so two scores of the same questions (avg@16 and
    pass@16) keep their correlation when they are averaged.
    """
    values = np.asarray(per_question, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a score needs at least one question")
    rng = np.random.default_rng(seed)
    chances = np.full(values.size, 1 / values.size)
    # All at once PopQA's counts alone would be 1.1 GB. In blocks the generator draws the same.
    rows = max(1, BLOCK // values.size)
    sizes = [min(rows, RESAMPLES - first) for first in range(0, RESAMPLES, rows)]
    sums = [rng.multinomial(values.size, chances, size=size) @ values for size in sizes]
    return Estimate(float(values.mean()), np.concatenate(sums) / values.size, values.size)


def bayes(outcomes: Outcomes, seed: int) -> Estimate:
    """Bayes@N: the posterior mean accuracy, with its credible interval.

    The number of correct responses to a question is binomial with an unknown probability p_q, whose
    prior is uniform. With c_q correct of N responses the posterior is Beta(1 + c_q, 1 + N - c_q).
    The score is the posterior mean of the average of p_q over M questions:

        mu      = 1/M   sum_q (1 + c_q) / (N + 2)
        sigma^2 = 1/M^2 sum_q (1 + c_q) (1 + N - c_q) / ((N + 2)^2 (N + 3))

    The interval is the central 95 % of draws from that posterior, about mu +- 1.96 sigma. It
    measures the sampling of responses for these questions, the bootstrap interval of avg@N the
    choice of questions as well. With equal N, mu = (1 + N avg@N) / (N + 2).

    Source: arXiv 2510.04265, with two categories, weights 0 and 1, and no prior data.
    """
    n = np.array([len(flags) for flags in outcomes.values()], dtype=np.float64)
    correct = np.array([sum(flags) for flags in outcomes.values()], dtype=np.float64)
    if n.size == 0:
        raise ValueError("a score needs at least one question")
    rng = np.random.default_rng(seed)
    draws = np.zeros(RESAMPLES)
    # One question at a time bounds the memory.
    for right, samples in zip(correct, n, strict=True):
        draws += rng.beta(1.0 + right, 1.0 + samples - right, RESAMPLES)
    mean = float(((1.0 + correct) / (n + 2.0)).mean())
    return Estimate(mean, draws / n.size, n.size)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The plain mean of several scores; its interval follows from their bootstrap draws."""
    draws = np.mean([e.draws for e in estimates], axis=0)
    value = float(np.mean([e.value for e in estimates]))
    return Estimate(value, draws, sum(e.n_questions for e in estimates))


def column_means(
    suite: Suite, scores: Mapping[str, Mapping[str, Estimate]]
) -> dict[str, Estimate | None]:
    """The suite's groups and its average by title; None unless all columns were run."""
    found: dict[str, Estimate | None] = {}
    for title, columns in {**suite.groups, suite.average_title: suite.average}.items():
        parts = [scores.get(benchmark, {}).get(name) for benchmark, name in columns]
        there = [part for part in parts if part is not None]
        found[title] = mean_of(there) if there and len(there) == len(columns) else None
    return found


def per_question(outcomes: Outcomes, benchmark: Benchmark) -> dict[str, list[float]]:
    """Each score of a benchmark by name, for every question: the mean, and the pass@k."""
    counts = [(len(flags), sum(flags)) for flags in outcomes.values()]
    rates = {
        f"pass@{k}": [pass_at_k(n, correct, k) for n, correct in counts] for k in benchmark.pass_at
    }
    return {benchmark.mean_name: [correct / n for n, correct in counts], **rates}


def scores(
    benchmark: Benchmark, rows: Sequence[Mapping[str, Any]], seed: int
) -> dict[str, Estimate]:
    """The scores of a benchmark by name.

    Names are the mean's (`accuracy`, `avg@16`), `pass@k`, `bayes@N` with several samples, and those
    of each group as `accuracy/5`. With headline groups the first are the plain means of those
    groups' scores, else they are over all questions.
    """
    by_group: dict[str, dict[str, Estimate]] = {}
    for group, outcomes in grouped_outcomes(benchmark, rows).items():
        # Groups are resampled independently; the scores of one group from the same resamples.
        draw = sample_seed(seed, benchmark.name, group, 0)
        values = per_question(outcomes, benchmark)
        by_group[group] = {name: estimate(part, draw) for name, part in values.items()}
        if benchmark.settings.n > 1:
            by_group[group][f"bayes@{benchmark.settings.n}"] = bayes(outcomes, draw)
    names = next(iter(by_group.values()), {})
    headline = [by_group[group] for group in headline_groups(benchmark, by_group)]
    whole = {name: mean_of([part[name] for part in headline]) for name in names if headline}
    return whole | {
        f"{name}/{group}": part[name] for name in names for group, part in by_group.items() if group
    }


def headline_groups(benchmark: Benchmark, groups: Iterable[str]) -> list[str]:
    """The groups whose mean is the benchmark's score."""
    return [group for group in groups if group in (benchmark.headline_groups or ("",))]


def by_question(rows: Sequence[Mapping[str, Any]], field: str) -> dict[str, list[Any]]:
    """A field of stored samples by question, in an order that no interruption changes."""
    found: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: (row["id"], row["sample"])):
        found.setdefault(row["id"], []).append(row[field])
    return found


def outcomes_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[bool]]:
    """Question id -> whether each of its samples is right."""
    found = by_question(rows, "correct")
    return {question: [bool(flag) for flag in flags] for question, flags in found.items()}


def grouped_outcomes(
    benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, list[bool]]]:
    """The outcomes of each group that is scored; "" is all questions, without headline groups."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    if not benchmark.headline_groups:
        groups[""] = list(rows)
    return {group: outcomes_of(groups[group]) for group in sorted(groups)}


def response_statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of truncated and of unreadable responses, and the mean length in tokens.

    A prompt that leaves no room for a response counts as truncated and unreadable with length 0.
    """
    n = len(rows)
    return {
        "n_samples": n,
        "truncation_rate": sum(row["finish_reason"] != "stop" for row in rows) / n,
        "prompt_too_long_rate": sum(row["finish_reason"] == "prompt_too_long" for row in rows) / n,
        "extraction_failure_rate": sum(row["extracted"] is None for row in rows) / n,
        "mean_tokens": sum(row["tokens"] for row in rows) / n,
    }
