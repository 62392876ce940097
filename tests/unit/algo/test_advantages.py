"""Group advantages: the two standard deviations of Eq. 4 and the bound of Theorem 3.3."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.algo.advantages import (
    COMPARING,
    compared_rewards,
    counted_std,
    equal_rewards,
    group_advantages,
)
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from tests.unit.algo.batches import PROPERTY, UNIFORM, WIDE


def rewards(seed: int, rows: int = 50, group: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, group, generator=generator, dtype=torch.float64)


def test_sample_is_upstreams_formula():
    values = rewards(0).float()
    centred = values - values.mean(-1, keepdim=True)
    expected = centred / (values.std(-1, keepdim=True) + 1e-9)
    assert torch.equal(group_advantages(values), expected)


def test_by_hand():
    row = torch.tensor([[3.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    assert group_advantages(row)[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    root = 3**0.5
    population = [root, -1 / root, -1 / root, -1 / root]
    assert group_advantages(row, "population")[0].tolist() == pytest.approx(population)


def test_population_squares_sum_to_the_group_size():
    squares = group_advantages(rewards(2), "population").square().sum(-1)
    assert torch.allclose(squares, torch.full_like(squares, 8.0), rtol=1e-7)


#: Two decimals up to 3.99, and larger ones. The mean of G float32 copies of most is another number.
VALUES = torch.tensor([*(i / 100 for i in range(-399, 400)), 3333.33, 1e6 / 3, 1e-3, 1e-30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [4, 7, 8, 16])
@pytest.mark.parametrize("std", ["sample", "population"])
def test_equal_rewards_give_zeros(std: str, group: int, dtype: torch.dtype) -> None:
    values = VALUES.to(dtype)[:, None].expand(-1, group).contiguous()
    assert equal_rewards(values).all()
    assert not group_advantages(values, std).any()
    assert not counted_std(values, torch.ones_like(values).bool(), std).any()
    everyone = torch.ones_like(values).bool()
    others = (torch.arange(group) != 1).expand_as(values)
    for estimator in {*COMPARING} - {"flash_reinforce"}:
        assert not compared_rewards(values, everyone, estimator, std).any(), estimator
        unlike = torch.where(others, values, 5e3)
        assert not compared_rewards(unlike, others, estimator, std).any(), estimator
    for row in values:
        assert not compared_rewards(row[None], everyone[:1], "flash_reinforce").any()


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    """A reward of 0.9, and one of 0.8 with a bonus of 0.1."""
    sums = torch.tensor([[0.9, 0.9, 0.8]]) + torch.tensor([[0.0, 0.0, 0.1]])
    assert sums[0, 0] != sums[0, 2]
    assert not group_advantages(sums).any()


@pytest.mark.parametrize(
    "row",
    [
        torch.tensor([1e6, 1e6 + 1]),
        torch.tensor([1.0, 1.00001]),
        torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([0.0, 1e-30]),
    ],
)
def test_other_differences_are_kept(row: torch.Tensor) -> None:
    assert not equal_rewards(row[None]).any()


@pytest.mark.parametrize("value", [0.9, 0.1, 3333.33])
def test_one_other_reward_keeps_the_signal_of_the_group(value: float) -> None:
    rewards = torch.tensor([[value] * 7 + [0.0]])
    found = group_advantages(rewards)[0].tolist()
    assert found == pytest.approx([0.35355] * 7 + [-2.47487], abs=1e-4)


def test_refusals():
    with pytest.raises(ValueError, match="std='biased': expected sample or population"):
        group_advantages(rewards(0), "biased")
    with pytest.raises(ValueError, match="group size 1: expected 2 or more"):
        group_advantages(rewards(0, group=1))


#: Rewards 1, 4, 7 of three responses, and one that does not count: m = 4, s = 3 (2.449 of all).
THREE = [[1.0, float("nan"), 4.0, 7.0], [2.0, 2.0, 2.0, 6.0]]
COUNT = [[True, False, True, True], [True] * 4]


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("dr_grpo", [-3.0, 0.0, 0.0, 3.0], [-1.0, -1.0, -1.0, 3.0]),
        ("reinforce_baseline", [-3.0, 0.0, 0.0, 3.0], [-1.0, -1.0, -1.0, 3.0]),
        ("rloo", [1.0 - 5.5, 0.0, 4.0 - 4.0, 7.0 - 2.5], [-4 / 3, -4 / 3, -4 / 3, 4.0]),
        ("group_norm", [-1.0, 0.0, 0.0, 1.0], [-0.5, -0.5, -0.5, 1.5]),
        # The mean of all seven is 24 / 7.
        (
            "flash_reinforce",
            [1 - 24 / 7, 0.0, 4 - 24 / 7, 7 - 24 / 7],
            [2 - 24 / 7] * 3 + [6 - 24 / 7],
        ),
    ],
)
def test_a_response_that_does_not_count_is_compared_with_nobody(estimator, first, second):
    found = compared_rewards(torch.tensor(THREE).double(), torch.tensor(COUNT), estimator)
    assert found[0].tolist() == pytest.approx(first)
    assert found[1].tolist() == pytest.approx(second)


def test_the_std_is_of_those_that_count():
    counts = torch.tensor(COUNT)
    assert counted_std(torch.tensor(THREE), counts).flatten().tolist() == pytest.approx([3.0, 2.0])
    population = compared_rewards(torch.tensor(THREE), counts, "group_norm", "population")
    assert population[0].tolist() == pytest.approx([-(1.5**0.5), 0.0, 0.0, 1.5**0.5])


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "dr_grpo", "group_norm"])
def test_one_that_counts_alone_has_no_signal(estimator):
    counts = torch.tensor([[True, False], [False, False]])
    found = compared_rewards(torch.tensor([[3.0, 1.0], [2.0, 5.0]]), counts, estimator)
    assert torch.equal(found, torch.zeros(2, 2))


def test_an_estimator_that_compares_nothing_is_refused():
    with pytest.raises(ValueError, match="estimator='gae': expected one of rloo"):
        compared_rewards(torch.zeros(1, 2), torch.ones(1, 2).bool(), "gae")


def surrogate(log_ratio: float, advantage: float, cfg, dual_clip=None, log_p=-0.5) -> float:
    log_probs = torch.tensor([[log_p]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = policy_loss(
        log_probs, log_probs - log_ratio, advantages, mask, LossSettings(cfg, 0.2, 0.24, dual_clip)
    ).loss
    return -loss.item()


def max_surrogate(eps_high: float, group_size: int) -> float:
    """L = (1 + eps_high) sqrt(G), the constant of Theorem 3.3 (arXiv 2511.00066).

    It bounds the surrogate from above, for advantages by population std and a weight inside the
    clip. It is no lower bound: with A < 0 and a large w r the surrogate is w r A without a limit,
    unless dual clip limits it.
    """
    return (1 + eps_high) * math.sqrt(group_size)


reward_rows = st.lists(st.floats(-3.0, 3.0), min_size=2, max_size=8)


@PROPERTY
@given(row=reward_rows, log_ratio=st.floats(-5.0, 5.0), log_p=st.floats(-8.0, 0.0))
def test_property_surrogate_stays_below_the_bound(row, log_ratio, log_p):
    values = torch.tensor([row], dtype=torch.float64)
    bound = max_surrogate(0.24, len(row)) + 1e-9
    advantages = group_advantages(values, "population")
    for advantage in (advantages.max().item(), advantages.min().item()):
        for cfg in (UNIFORM, WIDE):
            assert surrogate(log_ratio, advantage, cfg, log_p=log_p) <= bound
            limited = surrogate(log_ratio, advantage, cfg, dual_clip=3.0, log_p=log_p)
            assert abs(limited) <= max(3.0 / 1.24, 1.0) * bound


def test_the_bound_is_nearly_reached_and_the_lower_side_has_none():
    row = torch.tensor([[1.0] + [0.0] * 15], dtype=torch.float64)
    best = group_advantages(row, "population")[0, 0].item()
    bound = max_surrogate(0.24, 16)
    assert bound == pytest.approx(1.24 * 4)
    assert 0.95 * bound < surrogate(1.0, best, UNIFORM) <= bound
    assert surrogate(4.0, -1.0, UNIFORM) < -10 * bound  # r A without a limit, short of dual clip
