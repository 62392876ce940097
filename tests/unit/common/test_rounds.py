"""Micro-batches of any number of samples: each sample once, no more tokens, less waiting."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.common.dealing import Dealt, deal, optimizer_steps, waiting
from sg_rlhf.common.rounds import WORTH, deal_steps


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(lengths, ranks, samples of a micro-batch)."""
    ranks, size = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    count = ranks * size * draw(st.integers(1, 5))
    return draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count)), ranks, size


def deal_rounds(lengths: list[int], ranks: int, size: int, costs: list[float]) -> Dealt:
    """One step."""
    (dealt,) = deal_steps(lengths, [range(len(lengths))], ranks, size, costs)
    return dealt


def costs_of(lengths: list[int]) -> list[float]:
    return [n * (1 + n / 40_000) for n in lengths]


def sums(dealt: Dealt, values: list[int] | list[float]) -> list[list[float]]:
    return [[sum(values[i] for i in samples) for samples in hand] for hand in dealt]


def slowest(dealt: Dealt, values: list[float]) -> float:
    return sum(max(at_once) for at_once in zip(*sums(dealt, values), strict=True))


@given(steps())
def test_every_sample_once_in_no_more_tokens_or_time_than_a_fixed_number_takes(
    step: tuple[list[int], int, int],
) -> None:
    lengths, ranks, size = step
    costs = costs_of(lengths)
    dealt, fixed = deal_rounds(lengths, ranks, size, costs), deal(lengths, ranks, size, packed=True)
    assert sorted(i for hand in dealt for samples in hand for i in samples) == list(
        range(len(lengths))
    )
    assert len({len(hand) for hand in dealt}) == 1 <= len(dealt[0]) <= len(fixed[0])
    assert all(samples for hand in dealt for samples in hand)
    assert max(map(max, sums(dealt, lengths))) <= max(map(max, sums(fixed, lengths)))
    assert slowest(dealt, costs) <= (1 + WORTH) * slowest(fixed, costs)
    assert dealt == deal_rounds(lengths, ranks, size, costs)


@pytest.mark.parametrize(("ranks", "size", "count"), [(8, 2, 64), (8, 1, 64), (8, 1, 256)])
@pytest.mark.parametrize("spread", [4, 8])
def test_ranks_wait_less_than_a_twelfth_of_the_time(
    ranks: int, size: int, count: int, spread: float
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
        of_steps = deal_steps(
            lengths, optimizer_steps(2 * count, count, seed, 0), ranks, size, costs
        )
        shares += [waiting(sums(dealt, costs)) for dealt in of_steps]
        passes += [len(dealt[0]) * ranks * size / count for dealt in of_steps]
    assert sum(shares) / len(shares) < 1 / 12
    assert sum(passes) / len(passes) < 0.8


def test_a_rank_alone_has_what_it_had() -> None:
    lengths = [5, 1, 4, 2, 3]
    assert deal_rounds(lengths, 1, 2, costs_of(lengths)) == deal(lengths, 1, 2, packed=True)


def test_short_samples_fill_what_a_long_one_leaves() -> None:
    lengths = [600, 300, 200, 100, 100, 100, 100, 100]
    first, second = deal_rounds(lengths, 2, 2, [float(n) for n in lengths])
    assert [sum(lengths[i] for i in s) for s in first] == [600, 200]
    assert [sum(lengths[i] for i in s) for s in second] == [600, 200]
