"""Paired differences: the test against enumeration and scipy, the interval against theory."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from sg_rlhf.eval.scores import metrics, paired, results
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.suite import Benchmark

AIME = SUITES["math"].select(["aime"])[0]
PAPER = SUITES["kk"].select(["paper_greedy"])[0]


@pytest.mark.parametrize("only_b", range(10))
def test_with_one_response_to_a_question_it_is_the_exact_mcnemar_test(only_b):
    for only_a in range(12):
        changes = [[1.0] * only_b + [-1.0] * only_a + [0.0] * 5]
        expected = 1.0 if only_a + only_b == 0 else binomtest(only_b, only_a + only_b).pvalue
        assert paired.sign_flip_p(changes) == pytest.approx(expected)


def enumerated(groups):
    """The share of all sign flips whose mean of means is as large."""
    terms = [value / len(group) for group in groups for value in group]
    seen = abs(math.fsum(terms))
    flips = itertools.product((-1, 1), repeat=len(terms))
    sums = [abs(math.fsum(s * t for s, t in zip(flip, terms, strict=True))) for flip in flips]
    return sum(total >= seen - 1e-9 for total in sums) / len(sums)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-16, 16), min_size=1, max_size=5), min_size=1, max_size=2))
def test_it_is_exact_for_counts_in_groups_of_any_size(groups):
    changes = [[float(value) for value in group] for group in groups]
    assert paired.sign_flip_p(changes) == pytest.approx(enumerated(changes), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_shares_are_enumerated(changes):
    changes = [round(change, 3) for change in changes]
    assert paired.sign_flip_p([changes]) == pytest.approx(enumerated([changes]), abs=1e-12)


def test_what_is_drawn_is_near_what_is_exact():
    rng = np.random.default_rng(0)
    counts = rng.integers(-8, 12, size=40).astype(float)
    exact = paired.sign_flip_p([list(counts)])
    drawn = paired.sign_flip_p([list(counts / 16 * 0.999)], seed=3)
    assert 0.001 < exact < 0.5
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact / paired.FLIPS) + 1e-5)
    assert drawn == paired.sign_flip_p([list(counts / 16 * 0.999)], seed=3)


def test_it_is_wrong_no_more_often_than_it_says():
    """Over all signs of the same differences, which are equally likely without a difference."""
    sizes = (1.0, 1.0, 2.0, 3.0, 5.0, 5.0, 8.0)
    flips = list(itertools.product((-1, 1), repeat=len(sizes)))
    found = [paired.sign_flip_p([[s * d for s, d in zip(f, sizes, strict=True)]]) for f in flips]
    for level in (0.01, 0.05, 0.1, 0.2, 0.5):
        assert sum(p <= level + 1e-12 for p in found) / len(found) <= level + 1e-12


def drawn_rows(benchmark: Benchmark, n: int, chance: float, seed: int, groups=("",)) -> list[dict]:
    """Harder and easier questions, the same for every seed."""
    hard = np.random.default_rng(1).random(n)
    rng = np.random.default_rng(seed)
    return [
        {
            "id": f"q{number:03d}", "group": groups[number % len(groups)], "sample": sample,
            "correct": bool(rng.random() < chance * hard[number]),
        }
        for number in range(n)
        for sample in range(benchmark.settings.n)
    ]  # fmt: skip


def sides(benchmark, *chances, n=40, groups=("",)):
    rows = [drawn_rows(benchmark, n, c, 10 + i, groups) for i, c in enumerate(chances)]
    return rows, [metrics.grouped_outcomes(benchmark, part) for part in rows]


@pytest.mark.parametrize(("benchmark", "groups"), [(AIME, ("",)), (PAPER, tuple("2345678"))])
def test_the_scores_are_those_of_the_two_results(benchmark, groups):
    rows, (a, b) = sides(benchmark, 0.4, 0.7, n=49, groups=groups)
    found = paired.differences(benchmark, a, b, seed=5)
    of_a, of_b = (results.scores(benchmark, part, 5) for part in rows)
    # Bayes@N ranks as the average does, and is not compared again.
    assert list(found) == [name for name in of_a if not name.startswith("bayes@")]
    for name, difference in found.items():
        assert difference.a == pytest.approx(of_a[name].value)
        assert difference.b == pytest.approx(of_b[name].value)
        assert difference.change.value == pytest.approx(of_b[name].value - of_a[name].value)
        # The same resamples of the questions on both sides.
        assert np.allclose(difference.change.draws, of_b[name].draws - of_a[name].draws)
        assert 0 < difference.p <= 1


def test_the_interval_is_that_of_a_paired_mean():
    benchmark = AIME
    _, (a, b) = sides(benchmark, 0.5, 0.6, n=400)
    changes = [
        (sum(b[""][question]) - sum(flags)) / len(flags) for question, flags in a[""].items()
    ]
    found = paired.differences(benchmark, a, b, seed=0)["avg@16"]
    low, high = found.change.interval
    half = 1.96 * np.std(changes) / math.sqrt(len(changes))
    assert low == pytest.approx(np.mean(changes) - half, abs=0.1 * half)
    assert high == pytest.approx(np.mean(changes) + half, abs=0.1 * half)
    # Pairing takes out what makes some questions harder: unpaired it would be twice as wide.
    apart = math.hypot(*(np.std([np.mean(f) for f in side[""].values()]) for side in (a, b)))
    assert half < 0.6 * 1.96 * apart / math.sqrt(len(changes))


def test_the_same_responses_differ_nowhere():
    _, (a, _) = sides(AIME, 0.5, 0.5)
    for difference in paired.differences(AIME, a, a, seed=0).values():
        assert (difference.change.value, difference.p) == (0.0, 1.0)
        assert difference.change.interval == (0.0, 0.0)


def test_a_mean_of_benchmarks_has_an_interval_and_no_test():
    _, (a, b) = sides(AIME, 0.3, 0.6)
    parts = list(paired.differences(AIME, a, b, seed=0).values())
    mean = paired.mean_of(parts)
    assert mean.change.value == pytest.approx(np.mean([part.change.value for part in parts]))
    assert mean.p is None
    low, high = mean.change.interval
    assert low < mean.change.value < high
