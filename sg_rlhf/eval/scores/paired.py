"""Two models on the same questions: the difference of a score, its interval, and a test.

Everything is paired and clustered by question: a question's responses stay together, and each
question is compared with itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sg_rlhf.eval.scores import metrics
from sg_rlhf.eval.scores.metrics import Estimate, Outcomes
from sg_rlhf.tasks.questions import sample_seed
from sg_rlhf.tasks.suite import Benchmark

#: Sign flips that are drawn where they cannot all be counted.
FLIPS = 100_000
#: Up to so many questions that differ all 2^m flips are enumerated.
ENUMERATED = 16
#: Cells of the exact distribution of a sum of whole numbers.
_CELLS = 2_000_000

#: Group -> question id -> whether each of its samples is right; "" where there are no groups.
Grouped = Mapping[str, Outcomes]


def difference(a: Estimate, b: Estimate, p: float | None = None) -> dict[str, Any]:
    """B - A of one score, for JSON.

    Args:
        a, b: with the same resamples of the same questions.
        p: of `p_value`; None for an average of several benchmarks, whose questions differ.
    """
    # Without the digits that depend on the order of a sum.
    value, draws = b.value - a.value, b.draws - a.draws
    change = Estimate(round(value, 12) + 0.0, np.round(draws, 12) + 0.0, a.n_questions)
    return {
        "a": a.value, "b": b.value, "difference": change.value, "ci95": list(change.interval),
        "n_questions": a.n_questions, "p": p,
    }  # fmt: skip


def p_value(benchmark: Benchmark, name: str, a: Grouped, b: Grouped, seed: int) -> float:
    """Two-sided p of the difference of a score, by name as in `results.json`.

    Args:
        a, b: outcomes of the same questions, with the same number of samples.
    """
    score, _, part = name.partition("/")
    groups = [part] if part else metrics.headline_groups(benchmark, a)
    changes = []
    for group in groups:
        if score == benchmark.mean_name:
            # Counts of right responses are whole numbers, whose test is exact.
            sides = [[float(sum(flags)) for flags in side[group].values()] for side in (a, b)]
        else:
            sides = [metrics.per_question(side[group], benchmark)[score] for side in (a, b)]
        changes.append([y - x for x, y in zip(*sides, strict=True)])
    return sign_flip_p(changes, sample_seed(seed, benchmark.name, f"{score}/{part}", 0))


def sign_flip_p(groups: Sequence[Sequence[float]], seed: int = 0) -> float:
    """Two-sided p of "each question's difference could as well have had the other sign".

    The statistic is the mean of the groups' means. Whole numbers (counts of right responses) have
    the exact distribution of their sum; with one response to each question that is the exact
    McNemar test. Else all flips are enumerated, or drawn where there are too many.
    """
    sizes = [len(group) for group in groups]
    common = math.lcm(*sizes)
    weighted = [
        (value, common // size)
        for group, size in zip(groups, sizes, strict=True)
        for value in group
        if value
    ]
    if not weighted:
        return 1.0
    if all(float(value).is_integer() for value, _ in weighted):
        whole = [abs(int(value)) * weight for value, weight in weighted]
        total = abs(sum(int(value) * weight for value, weight in weighted))
        divisor = math.gcd(*whole)
        if sum(whole) // divisor * len(whole) <= _CELLS:
            return _exact(np.array(whole) // divisor, total // divisor)
    terms = np.array([value * weight for value, weight in weighted], dtype=np.float64)
    # Sums of the same terms in another order differ in their last digits.
    reached = abs(terms.sum()) * (1 - 1e-12)
    if len(terms) <= ENUMERATED:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(terms))))
        return float(np.mean(np.abs(signs @ terms) >= reached))
    rng = np.random.default_rng(seed)
    hits = 0
    for start in range(0, FLIPS, 10_000):
        size = (min(10_000, FLIPS - start), len(terms))
        signs = rng.integers(0, 2, size=size, dtype=np.int8) * 2.0 - 1.0
        hits += int(np.count_nonzero(np.abs(signs @ terms) >= reached))
    # The flip that was seen is one of them.
    return (hits + 1) / (FLIPS + 1)


def _exact(steps: NDArray[np.int64], total: int) -> float:
    """P(|sum of +-steps| >= total), every sign equally likely."""
    reach = int(steps.sum())
    chances = np.zeros(2 * reach + 1)
    chances[reach] = 1.0
    for step in steps:
        chances = 0.5 * (np.roll(chances, step) + np.roll(chances, -step))
    return float(min(1.0, chances[: reach - total + 1].sum() + chances[reach + total :].sum()))
