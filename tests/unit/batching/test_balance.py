"""Dealing a rollout: every sample once, ranks alike, whatever was finished first."""

from __future__ import annotations

import math
import random
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.batching import balance


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """(lengths, ranks, samples of a micro-batch, samples of an optimizer step)."""
    ranks, size = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    step = ranks * size * draw(st.integers(1, 6))
    count = step * draw(st.integers(1, 3))
    return draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count)), ranks, size, step


@given(rollouts(), st.booleans(), st.integers(0, 5))
def test_every_sample_is_dealt_once_and_ranks_and_steps_have_as_many(
    rollout: tuple[list[int], int, int, int], packed: bool, number: int
) -> None:
    lengths, ranks, size, step = rollout
    steps = balance.optimizer_steps(len(lengths), step, 42, number)
    dealt = balance.balance_steps(lengths, steps, ranks, size, packed=packed)
    assert [{len(samples) for samples in hand} for hand in dealt] == [{size}] * ranks
    hands = [[i for samples in hand for i in samples] for hand in dealt]
    own = step // ranks
    for k, members in enumerate(steps):
        trained = [i for hand in hands for i in hand[k * own : (k + 1) * own]]
        assert sorted(trained) == sorted(members)
    assert sorted(i for hand in hands for i in hand) == list(range(len(lengths)))


@given(rollouts(), st.integers(0, 5))
def test_a_single_rank_gets_neighbours_together_and_several_are_dealt_as_ever(
    rollout: tuple[list[int], int, int, int], number: int
) -> None:
    lengths, ranks, size, step = rollout
    steps = balance.optimizer_steps(len(lengths), step, 42, number)
    together = balance.balance_steps(lengths, steps, ranks, size, packed=True, neighbours=True)
    if ranks > 1:
        in_order = [sorted(drawn) for drawn in steps]
        assert together == balance.balance_steps(lengths, in_order, ranks, size, packed=True)
        return
    (hand,) = together
    own = step // size
    for k, drawn in enumerate(steps):
        micro_batches = hand[k * own : (k + 1) * own]
        assert [i for samples in micro_batches for i in samples] == sorted(drawn)
        assert {len(samples) for samples in micro_batches} == {size}


@given(rollouts(), st.integers(0, 5))
def test_a_step_has_the_same_samples_on_any_number_of_ranks(
    rollout: tuple[list[int], int, int, int], number: int
) -> None:
    """So a run that goes on with other ranks trains on the same in the same order."""
    lengths, ranks, size, step = rollout
    steps = balance.optimizer_steps(len(lengths), step, 42, number)

    def of_steps(ranks: int) -> list[list[int]]:
        dealt = balance.balance_steps(lengths, steps, ranks, size, packed=True)
        own = step // size // ranks
        return [
            sorted(i for hand in dealt for samples in hand[k : k + own] for i in samples)
            for k in range(0, len(dealt[0]), own)
        ]

    assert of_steps(ranks) == of_steps(1)


@given(rollouts(), st.integers(0, 5), st.randoms(use_true_random=False))
def test_which_samples_share_a_step_does_not_depend_on_their_lengths(
    rollout: tuple[list[int], int, int, int], number: int, shuffler: random.Random
) -> None:
    lengths, ranks, size, step = rollout
    steps = balance.optimizer_steps(len(lengths), step, 42, number)
    others = shuffler.sample(lengths, len(lengths))
    for of in (lengths, others):
        dealt = balance.balance_steps(of, steps, ranks, size, packed=True)
        own = step // ranks
        for k, members in enumerate(steps):
            hands = [list(chain.from_iterable(hand))[k * own : (k + 1) * own] for hand in dealt]
            assert sorted(chain.from_iterable(hands)) == sorted(members)


def test_each_rollout_and_each_seed_has_steps_of_its_own_for_ever() -> None:
    steps = balance.optimizer_steps(8, 4, 42, 3)
    assert steps == [[5, 2, 3, 0], [6, 1, 7, 4]]  # what runs before this one trained on
    assert steps != balance.optimizer_steps(8, 4, 42, 4) != balance.optimizer_steps(8, 4, 43, 4)


@given(rollouts())
def test_padded_micro_batches_pad_and_wait_for_no_more_than_they_must(
    rollout: tuple[list[int], int, int, int],
) -> None:
    """At each micro-batch all ranks' samples are the next ones by length, so the ranks differ, and
    a micro-batch pads, by no more than those do."""
    lengths, ranks, size, _ = rollout
    dealt = balance.balance(lengths, ranks, size, packed=False)
    by_length = sorted(lengths, reverse=True)
    for m in range(len(dealt[0])):
        at_once = [lengths[i] for hand in dealt for i in hand[m]]
        assert sorted(at_once, reverse=True) == by_length[m * ranks * size : (m + 1) * ranks * size]
        # Each rank has one of every round's samples.
        longest = sorted((max(lengths[i] for i in hand[m]) for hand in dealt), reverse=True)
        assert longest == by_length[m * ranks * size :][:ranks]


@given(rollouts())
def test_packed_micro_batches_of_two_differ_by_no_more_than_the_longest_sample(
    rollout: tuple[list[int], int, int, int],
) -> None:
    lengths, ranks, size, _ = rollout
    dealt = balance.balance(lengths, ranks, size, packed=True)
    tokens = [[sum(lengths[i] for i in samples) for samples in hand] for hand in dealt]
    every = sorted((t for hand in tokens for t in hand), reverse=True)
    for m, at_once in enumerate(zip(*tokens, strict=True)):
        assert sorted(at_once, reverse=True) == every[m * ranks : (m + 1) * ranks]
    if size <= 2:  # a longer first sample has a shorter second one
        assert max(every) - min(every) <= max(lengths)


def test_packed_rows_have_fewer_tokens_at_the_peak_than_neighbours_by_length() -> None:
    lengths = [4000, 3000, 2000, 1000, *[500] * 28]
    packed, padded = (
        max(
            sum(lengths[i] for i in samples)
            for hand in balance.balance(lengths, 2, 4, packed=is_packed)
            for samples in hand
        )
        for is_packed in (True, False)
    )
    assert (packed, padded) == (5500, 6000)


@pytest.mark.parametrize("packed", [True, False])
def test_one_rank_may_have_a_smaller_batch(packed: bool) -> None:
    (hand,) = balance.balance([5, 1, 4, 2, 3], 1, 2, packed=packed)
    assert sorted(chain.from_iterable(hand)) == [0, 1, 2, 3, 4] and max(map(len, hand)) == 2
    assert len(hand) == 3


def test_ranks_wait_for_the_slowest_at_each_micro_batch() -> None:
    assert balance.idle_fraction([[4, 1], [2, 3]]) == pytest.approx(1 - 10 / (2 * (4 + 3)))
    assert balance.idle_fraction([[4, 1]]) == 0


def test_what_does_not_divide_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="5 samples: no multiple of 2 ranks times 2"):
        balance.balance([1] * 5, 2, 2, packed=True)
    with pytest.raises(ValueError, match="10 samples: no multiple of the 4"):
        balance.optimizer_steps(10, 4, 0, 0)


# ---- micro-batches of any number of samples


def variable_size(
    lengths: list[int], ranks: int, size: int, costs: list[float], max_tokens: int = 0
) -> Any:
    """The assignment of one optimizer step; 0 tokens: those of a fixed number of samples."""
    step = range(len(lengths))
    if not max_tokens:
        fixed = balance.balance(lengths, ranks, size, packed=True)
        max_tokens = int(max(map(max, sums(fixed, lengths))))
    (assignment,) = balance.variable_size_steps(
        lengths, [step], ranks, size, costs, max_tokens=max_tokens
    )
    return assignment


def costs_of(lengths: list[int]) -> list[float]:
    return [n * (1 + n / 40_000) for n in lengths]


def sums(assignment: Any, values: list[int] | list[float]) -> list[list[float]]:
    return [[sum(values[i] for i in samples) for samples in own] for own in assignment]


def slowest(assignment: Any, values: list[float]) -> float:
    return sum(max(together) for together in zip(*sums(assignment, values), strict=True))


@given(rollouts())
def test_every_sample_once_in_no_more_tokens_or_time_than_a_fixed_number_takes(
    rollout: tuple[list[int], int, int, int],
) -> None:
    lengths, ranks, size, _ = rollout
    costs = costs_of(lengths)
    found = variable_size(lengths, ranks, size, costs)
    fixed = balance.balance(lengths, ranks, size, packed=True)
    indices = [i for own in found for samples in own for i in samples]
    assert sorted(indices) == list(range(len(lengths)))
    assert len({len(own) for own in found}) == 1 <= len(found[0]) <= len(fixed[0])
    assert all(samples for own in found for samples in own)
    assert max(map(max, sums(found, lengths))) <= max(map(max, sums(fixed, lengths)))
    assert slowest(found, costs) <= slowest(fixed, costs) / 0.99
    assert found == variable_size(lengths, ranks, size, costs)


@pytest.mark.parametrize(
    ("ranks", "size", "count", "most"),
    [(8, 4, 256, 1 / 25), (8, 1, 256, 1 / 25), (8, 2, 64, 1 / 7), (8, 1, 64, 1 / 4)],
)
@pytest.mark.parametrize("spread", [4, 8])
def test_the_share_of_the_time_that_ranks_wait(
    ranks: int, size: int, count: int, most: float, spread: float
) -> None:
    """Log-normal lengths, the longest so many times the median; the mean of several draws."""
    shares, passes = [], []
    for seed in range(5):
        chance = random.Random(seed)
        z = sorted(chance.gauss(0, 1) for _ in range(2 * count))
        scale = math.log(spread) / (z[-1] - z[count])
        lengths = [round(600 * math.exp(scale * (x - z[count]))) for x in z]
        chance.shuffle(lengths)
        costs = costs_of(lengths)
        steps = balance.optimizer_steps(2 * count, count, seed, 0)
        of_steps = balance.variable_size_steps(
            lengths, steps, ranks, size, costs, max_tokens=size * max(lengths)
        )
        for found in of_steps:
            shares.append(balance.idle_fraction(sums(found, costs)))
            passes.append(len(found[0]) * ranks * size / count)
    assert sum(shares) / len(shares) < most
    assert sum(passes) / len(passes) < 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_padded_micro_batches_keep_their_number_of_samples(ranks: int) -> None:
    lengths = [5, 1, 4, 2, 3, 6, 8, 7]
    steps, costs = [list(range(8))], costs_of(lengths)
    (found,) = balance.variable_size_steps(
        lengths, steps, ranks, 2, costs, max_tokens=100, packed=False
    )
    assert found == balance.balance(lengths, ranks, 2, packed=False)


@given(rollouts(), st.integers(1, 4))
def test_micro_batches_are_filled_to_the_tokens_that_fit(
    rollout: tuple[list[int], int, int, int], times: int
) -> None:
    """No micro-batch has more, and there are few more of them than the tokens need."""
    lengths, ranks, size, _ = rollout
    most = times * size * max(lengths)
    found = variable_size(lengths, ranks, size, costs_of(lengths), most)
    assert sorted(i for own in found for s in own for i in s) == list(range(len(lengths)))
    assert max(map(max, sums(found, lengths))) <= most
    fewest = -(-sum(lengths) // (most * ranks))
    # Each micro-batch but the last is more than half full, or the next sample would fit.
    assert len(found[0]) <= max(fewest + 3, len(lengths) // ranks // size)


def test_one_rank_and_the_recipe_on_eight_take_a_third_of_the_passes() -> None:
    """Knights & Knaves: 256 samples of 1,365 tokens, 20,480 in a micro-batch; 4 samples took 8."""
    chance = random.Random(0)
    lengths = [min(5120, round(chance.lognormvariate(7.0, 0.6))) for _ in range(256)]
    for ranks, count in ((8, 3), (1, sum(lengths) // 20_480 + 1)):
        found = variable_size(lengths, ranks, 4, costs_of(lengths), 20_480)
        assert len(found[0]) == count
        assert balance.idle_fraction(sums(found, costs_of(lengths))) < 0.02


def test_short_samples_run_next_to_a_long_one() -> None:
    lengths = [600, 300, 200, 100, 100, 100, 100, 100]
    first, second = variable_size(lengths, 2, 2, [float(n) for n in lengths])
    assert [[lengths[i] for i in samples] for samples in first] == [[600], [200, 100]]
    assert [[lengths[i] for i in samples] for samples in second] == [[300, 100], [100, 100, 100]]
