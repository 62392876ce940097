"""Scores: pass@k against enumeration, intervals against theory, rates against counts."""

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.eval.scores import metrics


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, data):
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    flags = [True] * correct + [False] * (n - correct)
    subsets = list(itertools.combinations(flags, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert metrics.pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_exact_for_every_k_of_up_to_64_samples():
    """Beside the product of the chances that one after the other is wrong, without binomials."""
    for n in (1, 2, 16, 32, 63, 64):
        for correct in range(n + 1):
            all_wrong = Fraction(1)
            for k in range(1, n + 1):
                left = n - k + 1  # samples that were not drawn yet
                all_wrong *= Fraction(max(0, left - correct), left)
                assert metrics.pass_at_k(n, correct, k) == pytest.approx(
                    float(1 - all_wrong), abs=1e-15
                )


def test_an_interval_is_that_of_all_resamples_of_the_questions():
    """Three problems can be resampled in 27 ways; whole problems, never single responses."""
    outcomes = {"a": [True] * 4 + [False] * 12, "b": [False] * 16, "c": [True] * 16}
    values = [metrics.pass_at_k(16, sum(flags), 8) for flags in outcomes.values()]
    found = metrics.estimate(values, seed=1)
    resamples = [sum(drawn) / 3 for drawn in itertools.product(values, repeat=3)]
    shares = {round(v, 9): resamples.count(v) / 27 for v in resamples}
    seen = {key: np.isclose(found.draws, key).mean() for key in shares}
    assert sum(seen.values()) == pytest.approx(1.0)  # nothing between: no response was drawn alone
    for key, share in shares.items():
        assert seen[key] == pytest.approx(share, abs=0.02)
    assert found.value == pytest.approx(sum(values) / 3)


def test_bayes_at_n_is_the_mean_and_interval_of_the_posterior():
    outcomes = {"a": [True] * 3 + [False], "b": [False] * 4, "c": [True] * 4}
    found = metrics.bayes(outcomes, seed=1)
    # Laplace's rule of succession, question by question.
    assert found.value == pytest.approx((4 / 6 + 1 / 6 + 5 / 6) / 3)
    variance = sum(a * (6 - a) / (6**2 * 7) for a in (4, 1, 5)) / 3**2
    assert found.draws.mean() == pytest.approx(found.value, abs=0.005)
    assert found.draws.std() == pytest.approx(math.sqrt(variance), rel=0.03)
    low, high = found.interval
    assert low == pytest.approx(found.value - 1.96 * math.sqrt(variance), abs=0.02)
    assert high == pytest.approx(found.value + 1.96 * math.sqrt(variance), abs=0.02)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_bayes_at_n_ranks_as_the_average_does(counts):
    outcomes = {str(q): [True] * c + [False] * (5 - c) for q, c in enumerate(counts)}
    average = sum(counts) / 5 / len(counts)
    assert metrics.bayes(outcomes, 0).value == pytest.approx((1 + 5 * average) / 7)


def test_bayes_at_n_has_a_width_where_every_response_is_right():
    found = metrics.bayes({str(q): [True] * 16 for q in range(30)}, seed=0)
    assert found.value == pytest.approx(17 / 18)
    low, high = found.interval
    assert low < found.value < high < 1.0


def test_the_memory_of_a_bootstrap_is_bounded_and_blocks_draw_what_one_draw_does(monkeypatch):
    values = np.random.default_rng(0).random(14_267)  # as many questions as PopQA has
    monkeypatch.setattr(metrics, "RESAMPLES", 1000)
    tracemalloc.start()
    found = metrics.estimate(values, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    monkeypatch.setattr(metrics, "BLOCK", 2**30)
    assert np.allclose(found.draws, metrics.estimate(values, seed=1).draws, rtol=1e-12)


@pytest.mark.parametrize("correct", range(17))
def test_with_k_equal_n_it_is_any_correct_and_with_k_1_the_share(correct):
    assert metrics.pass_at_k(16, correct, 16) == float(correct > 0)
    assert metrics.pass_at_k(16, correct, 1) == pytest.approx(correct / 16)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(n, correct, k):
    with pytest.raises(ValueError):
        metrics.pass_at_k(n, correct, k)


def test_the_interval_is_that_of_the_normal_approximation_for_many_questions():
    values = [1.0] * 300 + [0.0] * 700
    found = metrics.estimate(values, seed=0)
    low, high = found.interval
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert found.value == pytest.approx(0.3)
    assert low == pytest.approx(0.3 - half, abs=0.003)
    assert high == pytest.approx(0.3 + half, abs=0.003)


def test_equal_seeds_keep_the_correlation_of_two_scores_of_the_same_questions():
    values = np.random.default_rng(0).random(40)
    one, two = metrics.estimate(values, seed=5), metrics.estimate(1 - values, seed=5)
    assert np.allclose(one.draws + two.draws, 1.0)
    other = metrics.estimate(1 - values, seed=6)
    assert not np.allclose(one.draws + other.draws, 1.0)


def test_the_mean_of_scores_has_the_interval_of_a_mean():
    parts = [metrics.estimate([0.0, 1.0] * 200, seed=seed) for seed in range(4)]
    found = metrics.mean_of(parts)
    single = parts[0].interval[1] - parts[0].interval[0]
    assert found.value == pytest.approx(0.5)
    # four independent sets: half the width
    assert found.interval[1] - found.interval[0] == pytest.approx(single / 2, rel=0.1)


def row(question, sample, correct, finish="stop", extracted="x", tokens=10):
    return {
        "id": question,
        "sample": sample,
        "correct": correct,
        "finish_reason": finish,
        "extracted": extracted,
        "tokens": tokens,
    }


def test_outcomes_do_not_depend_on_the_order_in_which_samples_were_stored():
    rows = [row("b", 1, True), row("a", 0, False), row("b", 0, False), row("a", 1, True)]
    assert metrics.outcomes_of(rows) == {"a": [False, True], "b": [False, True]}
    assert list(metrics.outcomes_of(rows[::-1])) == ["a", "b"]


def test_rates_count_a_prompt_without_room_as_truncated_and_unreadable():
    rows = [
        row("a", 0, True),
        row("b", 0, False, finish="length", extracted=None, tokens=100),
        row("c", 0, False, finish="prompt_too_long", extracted=None, tokens=0),
        row("d", 0, False, extracted=None),
    ]
    assert metrics.response_statistics(rows) == {
        "n_samples": 4,
        "truncation_rate": 0.5,
        "prompt_too_long_rate": 0.25,
        "extraction_failure_rate": 0.75,
        "mean_tokens": 30.0,
    }
