"""Micro-batches of any number of samples: each sample once, no more tokens, less waiting."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.batching.balance import Assignment, balance, idle_fraction, optimizer_steps
from sg_rlhf.batching.padded_rounds import padded
from sg_rlhf.batching.rounds import WORTH, variable_size_steps


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(lengths, ranks, samples of a micro-batch)."""
    ranks, size = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    count = ranks * size * draw(st.integers(1, 5))
    return draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count)), ranks, size


def deal_rounds(
    lengths: list[int], ranks: int, size: int, costs: list[float], packed: bool = True
) -> Assignment:
    """One step."""
    (dealt,) = variable_size_steps(
        lengths, [range(len(lengths))], ranks, size, costs, packed=packed
    )
    return dealt


def costs_of(lengths: list[int]) -> list[float]:
    return [n * (1 + n / 40_000) for n in lengths]


def sums(
    dealt: Assignment, values: list[int] | list[float], packed: bool = True
) -> list[list[float]]:
    of = sum if packed else padded
    return [[of(values[i] for i in samples) for samples in hand] for hand in dealt]


def slowest(dealt: Assignment, values: list[float], packed: bool = True) -> float:
    return sum(max(at_once) for at_once in zip(*sums(dealt, values, packed), strict=True))


@given(steps(), st.booleans())
def test_every_sample_once_in_no_more_tokens_or_time_than_a_fixed_number_takes(
    step: tuple[list[int], int, int], packed: bool
) -> None:
    lengths, ranks, size = step
    costs = costs_of(lengths)
    dealt = deal_rounds(lengths, ranks, size, costs, packed)
    fixed = balance(lengths, ranks, size, packed=packed)
    assert sorted(i for hand in dealt for samples in hand for i in samples) == list(
        range(len(lengths))
    )
    assert len({len(hand) for hand in dealt}) == 1 <= len(dealt[0]) <= len(fixed[0])
    assert all(samples for hand in dealt for samples in hand)
    assert max(map(max, sums(dealt, lengths, packed))) <= max(
        map(max, sums(fixed, lengths, packed))
    )
    assert slowest(dealt, costs, packed) <= (1 + WORTH) * slowest(fixed, costs, packed)
    assert dealt == deal_rounds(lengths, ranks, size, costs, packed)


@pytest.mark.parametrize(
    ("ranks", "size", "count", "packed", "most"),
    [
        (8, 2, 64, True, 1 / 12),
        (8, 1, 64, True, 1 / 12),
        (8, 1, 256, True, 1 / 12),
        (8, 4, 256, False, 1 / 24),  # with as many samples each: 10 and 19 %
        (8, 2, 64, False, 1 / 8),  # 21 and 33 %
    ],
)
@pytest.mark.parametrize("spread", [4, 8])
def test_the_share_of_the_time_that_ranks_wait(
    ranks: int, size: int, count: int, packed: bool, most: float, spread: float
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
        of_steps = variable_size_steps(
            lengths, optimizer_steps(2 * count, count, seed, 0), ranks, size, costs, packed=packed
        )
        shares += [idle_fraction(sums(dealt, costs, packed)) for dealt in of_steps]
        passes += [len(dealt[0]) * ranks * size / count for dealt in of_steps]
    assert sum(shares) / len(shares) < most
    assert sum(passes) / len(passes) < 0.9


def test_a_rank_alone_has_what_it_had() -> None:
    lengths = [5, 1, 4, 2, 3]
    assert deal_rounds(lengths, 1, 2, costs_of(lengths)) == balance(lengths, 1, 2, packed=True)


def test_short_samples_fill_what_a_long_one_leaves() -> None:
    lengths = [600, 300, 200, 100, 100, 100, 100, 100]
    first, second = deal_rounds(lengths, 2, 2, [float(n) for n in lengths])
    assert [sum(lengths[i] for i in s) for s in first] == [600, 200]
    assert [sum(lengths[i] for i in s) for s in second] == [600, 200]


def test_short_samples_of_one_length_fill_what_a_long_one_leaves() -> None:
    lengths = [600, 320, 300, 300, 200, 200, 100, 100]
    first, second = deal_rounds(lengths, 2, 2, [float(n) for n in lengths], packed=False)
    assert [[lengths[i] for i in s] for s in first] == [[600], [320, 200]]
    assert [[lengths[i] for i in s] for s in second] == [[300, 300], [200, 100, 100]]
