"""Two models on the same questions: the difference of a score, its interval, and a test.

Everything is paired and clustered by question: a question's responses stay together, and each
question is compared with itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

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


@dataclass(frozen=True)
class Difference:
    """One score of two models.

    Attributes:
        a: the first model's score.
        b: the second one's.
        change: B - A, with its bootstrap over questions.
        p: two-sided, of `sign_flip_p`; None for an average of several benchmarks.
    """

    a: float
    b: float
    change: Estimate
    p: float | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        low, high = self.change.interval
        return {
            "a": self.a, "b": self.b, "difference": self.change.value, "ci95": [low, high],
            "n_questions": self.change.n_questions, "p": self.p,
        }  # fmt: skip


#: Group -> question id -> whether each of its samples is right; "" where there are no groups.
Grouped = Mapping[str, Outcomes]


def differences(benchmark: Benchmark, a: Grouped, b: Grouped, seed: int) -> dict[str, Difference]:
    """Every score of a benchmark, named and ordered as in `results.json`.

    Args:
        a: the first model's outcomes; `b` has the same groups, questions and number of samples.
        seed: of the bootstrap (as `results.scores` draws it) and of sign flips that are drawn.
    """
    values_a = {group: metrics.per_question(a[group], benchmark) for group in sorted(a)}
    values_b = {group: metrics.per_question(b[group], benchmark) for group in sorted(a)}
    headline = [group for group in values_a if group in (benchmark.headline_groups or ("",))]
    parts = {"": headline} if headline else {}
    parts |= {group: [group] for group in values_a if group}
    found = {}
    for part, groups in parts.items():
        for name in values_a[groups[0]]:
            changes = [
                [y - x for x, y in zip(values_a[g][name], values_b[g][name], strict=True)]
                for g in groups
            ]
            estimates = [
                metrics.estimate(change, sample_seed(seed, benchmark.name, group, 0))
                for change, group in zip(changes, groups, strict=True)
            ]
            # Counts of right responses are whole numbers, whose test is exact.
            of_mean = name == benchmark.mean_name
            tested = [_counts(a[group], b[group]) for group in groups] if of_mean else changes
            draw = sample_seed(seed, benchmark.name, f"{name}/{part}", 0)
            found[f"{name}/{part}" if part else name] = Difference(
                a=float(np.mean([np.mean(values_a[group][name]) for group in groups])),
                b=float(np.mean([np.mean(values_b[group][name]) for group in groups])),
                change=metrics.mean_of(estimates),
                p=sign_flip_p(tested, draw),
            )
    return found


def mean_of(parts: Sequence[Difference]) -> Difference:
    """The plain mean of several scores; no test, for their questions are not the same."""
    return Difference(
        float(np.mean([part.a for part in parts])),
        float(np.mean([part.b for part in parts])),
        metrics.mean_of([part.change for part in parts]),
    )


def sign_flip_p(groups: Sequence[Sequence[float]], seed: int = 0) -> float:
    """Two-sided p of "each question's difference could as well have had the other sign".

    The statistic is the mean of the groups' means. Whole numbers (counts of right responses) have
    the exact distribution of their sum; with one response to each question that is the exact
    McNemar test. Else all flips are enumerated, or drawn where there are too many.

    Args:
        groups: differences by question.
        seed: of the drawn flips.
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


def _counts(a: Outcomes, b: Outcomes) -> list[float]:
    return [float(sum(b[question]) - sum(a[question])) for question in a]
