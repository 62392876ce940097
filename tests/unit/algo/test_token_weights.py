"""Weights: the two readings of Eq. 19, extremes, refusals, ranges, dead zones, properties."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.algo.analysis.gradient_dead_zones import dead_zones, dual_clip_zone
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights, weight_sum_and_count
from sg_rlhf.algo.weightings import CONSTANT_TOLERANCE, ConstantWeightError, TokenContext
from sg_rlhf.algo.weightings.ar import AdvantageReweighting
from sg_rlhf.algo.weightings.base import Weighting
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from sg_rlhf.algo.weightings.random import Random
from sg_rlhf.algo.weightings.reverse import Reverse
from sg_rlhf.algo.weightings.stapo import Stapo
from sg_rlhf.algo.weightings.uniform import Uniform
from tests.unit.algo.batches import (
    PRINTED_EQ19,
    PROPERTY,
    PUBLISHED,
    QUOTIENT,
    UNIFORM,
    WIDE,
    random_batch,
    reverse_of,
    weight_by_hand,
)

PROBS = [0.0, 0.1, 0.25, 0.5, 0.75, 1.0]
UNCLIPPED = {"lower": 0.0, "upper": 10.0, "allow_constant": True}


def weights_at(probs: list[float], cfg: Weighting) -> list[float]:
    log_probs = torch.tensor(probs, dtype=torch.float64).log()
    return token_weights(log_probs, cfg).tolist()


def first_dead(cfg: Weighting, eps_high: float = 0.24) -> float | None:
    """The smallest p whose token with A > 0 has no policy gradient at r = 1."""
    zone = dead_zones(cfg, eps_high=eps_high).positive
    return None if zone is None else zone[0]


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (GrpoSG(**UNCLIPPED), [0.500, 0.922, 1.309, 1.478, 1.498, 1.500]),
        (PUBLISHED, [1.000, 1.000, 1.309, 1.400, 1.400, 1.400]),
        (
            GrpoSG(form="quotient", **UNCLIPPED),
            [0.500, 0.506, 0.514, 0.528, 0.542, 0.555],
        ),
        (PRINTED_EQ19, [1.0] * 6),
    ],
)
def test_table_of_the_two_forms(cfg, expected):
    assert weights_at(PROBS, cfg) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("cfg", [PUBLISHED, WIDE, QUOTIENT])
def test_weights_are_eq_19_by_hand(cfg):
    probs = torch.linspace(0, 1, 101, dtype=torch.float64).tolist()
    expected = [weight_by_hand(p, cfg) for p in probs]
    assert weights_at(probs, cfg) == pytest.approx(expected, abs=1e-12)


def test_reverse_is_two_minus_the_weight():
    reverse = reverse_of(WIDE)
    expected = [2.0 - w for w in weights_at(PROBS, WIDE)]
    assert weights_at(PROBS, reverse) == pytest.approx(expected, abs=1e-12)
    assert weights_at([0.9], reverse) < weights_at([0.1], reverse)


def test_uniform_is_exactly_one():
    log_probs = torch.linspace(-9, 0, 100)
    for cfg in (UNIFORM, PRINTED_EQ19):
        assert torch.equal(token_weights(log_probs, cfg), torch.ones(100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("cfg", [PUBLISHED, WIDE, QUOTIENT, reverse_of(WIDE)])
def test_extreme_log_probs_give_finite_weights_in_range(dtype, cfg):
    log_probs = torch.tensor([0.0, -0.0, -1e4, -math.inf, 1e-6, 1e-3, -1e-30, -88.0], dtype=dtype)
    weights = token_weights(log_probs, cfg)
    low, high = cfg.bounds()
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(((weights >= low - 1e-6) & (weights <= high + 1e-6)).all())
    assert weights[2] == weights[3]
    assert weights[3].item() == pytest.approx(weights_at([0.0], cfg)[0], abs=1e-6)
    assert weights[5] == weights[0]  # p is held to 1


def test_nan_is_not_hidden_but_masked_nan_is_not_read():
    log_probs = torch.tensor([[math.nan, -1.0]])
    assert token_weights(log_probs, PUBLISHED).isnan().tolist() == [[True, False]]
    mask = torch.tensor([[False, True]])
    normalized = replace(PUBLISHED, normalize="batch_mean")
    assert token_weights(log_probs, normalized, mask)[0, 1].item() == 1.0
    assert bool(token_weights(log_probs, PUBLISHED, mask).isfinite().all())


def test_weights_carry_no_gradient():
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    assert not token_weights(log_probs, PUBLISHED).requires_grad
    # The weight's own slope would change this gradient: w = 1.2 at a steep place of the curve.
    p = torch.tensor([[0.2]], dtype=torch.float64)
    log_p = p.log().requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = policy_loss(
        log_p, log_p.detach(), torch.ones(1, 1), mask, LossSettings(PUBLISHED, 0.2, 0.9)
    ).loss
    loss.backward()
    assert log_p.grad.item() == pytest.approx(-weight_by_hand(0.2, PUBLISHED), abs=1e-12)


# --- the configuration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("form", "Product", "product, quotient"),
        ("placement", "", "inside, outside"),
        ("normalize", "mean", "None, batch_mean"),
        ("alpha", math.nan, "finite"),
        ("mu", math.inf, "finite"),
        ("upper", -math.inf, "finite"),
        ("lower", "1.0", "finite"),
        ("tau", True, "finite"),
        ("tau", 0.0, "above 0"),
        ("tau", -9.0, "above 0"),
        ("lower", -0.1, "0 or more"),
        ("upper", 0.9, "lower=1.0 or more"),
    ],
)
def test_a_bad_value_is_named_in_one_line(key, value, words):
    with pytest.raises(ValueError) as caught:
        GrpoSG(**{key: value})
    message = str(caught.value)
    assert message.startswith(f"{key}={value!r}: expected") and words in message
    assert "\n" not in message


def test_reverse_refuses_a_negative_weight():
    with pytest.raises(ValueError, match=r"upper=2\.5: expected 2 or less"):
        Reverse(lower=0.0, upper=2.5, alpha=6.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"form": "quotient"},
        {"form": "quotient", "tau": 0.92},
        {"form": "quotient", "tau": 20.0},
        {"lower": 1.2, "upper": 1.2},
        {"alpha": 0.0},
        {"tau": 1e-9},
        {"form": "quotient", "normalize": "batch_mean"},
    ],
)
def test_a_single_valued_weight_is_refused(changes):
    with pytest.raises(ConstantWeightError, match=r"plain GRPO.*allow_constant=true") as caught:
        GrpoSG(**changes)
    assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)
    low, high = GrpoSG(**changes, allow_constant=True).bounds()
    assert high - low <= CONSTANT_TOLERANCE


def test_what_varies_is_accepted():
    for varying in (GrpoSG(form="quotient", tau=0.9), GrpoSG(tau=1.11)):  # 1.0986 is the limit
        low, high = varying.bounds()
        assert high - low > CONSTANT_TOLERANCE
    assert Uniform().bounds() == (1.0, 1.0)
    assert first_dead(Uniform()) is None


def test_table_7_tau_half_is_plain_grpo_in_the_product_form():
    cfg = GrpoSG(tau=0.5, allow_constant=True)
    assert cfg.bounds() == (1.0, 1.0)
    assert first_dead(cfg) is None


# --- range and dead zones ----------------------------------------------------------------------


def test_published_range_and_dead_zone():
    assert PUBLISHED.bounds() == (1.0, 1.4)
    closed_form = math.log(0.87 / 0.13) / 9  # logit((1 + eps_high) / alpha + mu) / tau
    assert (
        first_dead(PUBLISHED)
        == pytest.approx(closed_form, abs=1e-9)
        == pytest.approx(0.211, abs=5e-4)
    )


def test_dead_zone_depends_on_the_clip_and_the_placement():
    assert first_dead(PUBLISHED, eps_high=0.28) > first_dead(PUBLISHED)
    assert first_dead(PUBLISHED, eps_high=0.4) is None
    assert first_dead(replace(PUBLISHED, upper=1.2)) is None
    assert first_dead(replace(PUBLISHED, placement="outside")) is None
    assert first_dead(PRINTED_EQ19) is None
    # 2 - w is 1.5 at p = 0 and falls: the dead zone starts at 0.
    assert first_dead(reverse_of(WIDE)) == 0.0


def test_dead_zones_of_both_signs():
    positive, negative = dead_zones(WIDE)
    assert positive == (pytest.approx(math.log(0.87 / 0.13) / 9, abs=1e-9), 1.0)
    assert negative == (0.0, pytest.approx(math.log(0.65 / 0.35) / 9, abs=1e-9))  # w = 0.8
    assert dead_zones(PUBLISHED).negative is None
    assert dead_zones(replace(WIDE, lower=0.8)).negative is None
    assert dead_zones(replace(WIDE, placement="outside")) == (None, None)
    # 2 - w falls from 1.5 to 0.5: the zones change ends. w = 0.76 and w = 1.2.
    positive, negative = dead_zones(reverse_of(WIDE))
    assert positive == (0.0, pytest.approx(math.log(0.63 / 0.37) / 9, abs=1e-9))
    assert negative == (pytest.approx(math.log(0.85 / 0.15) / 9, abs=1e-9), 1.0)


def policy_gradient_at(p: float, advantage: float, cfg: Weighting) -> float:
    log_p = torch.tensor([[math.log(p)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.full((1, 1), advantage, dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = policy_loss(log_p, log_p.detach(), advantages, mask, LossSettings(cfg, 0.2, 0.24)).loss
    return torch.autograd.grad(loss, log_p)[0].item()


@pytest.mark.parametrize("cfg", [PUBLISHED, WIDE, GrpoSG(form="quotient", tau=0.1, lower=0.9)])
def test_gradient_vanishes_at_the_dead_zone_and_not_below(cfg):
    dead = first_dead(cfg)
    assert 0.0 < dead < 1.0
    assert policy_gradient_at(dead + 1e-7, +1.0, cfg) == 0.0
    assert policy_gradient_at(0.999, +1.0, cfg) == 0.0
    assert policy_gradient_at(dead - 1e-7, +1.0, cfg) < -0.5
    assert policy_gradient_at(dead + 1e-7, -1.0, cfg) > 0.5
    outside = replace(cfg, placement="outside")
    assert policy_gradient_at(dead + 1e-7, +1.0, outside) < -0.5


def test_gradient_vanishes_in_the_negative_dead_zone():
    _, edge = dead_zones(WIDE).negative
    assert policy_gradient_at(edge - 1e-7, -1.0, WIDE) == 0.0
    assert policy_gradient_at(edge + 1e-7, -1.0, WIDE) > 0.5
    assert policy_gradient_at(edge - 1e-7, +1.0, WIDE) < -0.5


# --- normalisation -----------------------------------------------------------------------------


def test_batch_mean_normalisation():
    batch = random_batch(0)
    cfg = replace(WIDE, normalize="batch_mean")
    raw = token_weights(batch.log_probs, WIDE, batch.mask)
    weights = token_weights(batch.log_probs, cfg, batch.mask)
    assert weights[batch.mask].mean().item() == pytest.approx(1.0, abs=1e-12)
    ratio = (weights / raw)[batch.mask]
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=0, atol=1e-12)
    assert token_weights(batch.log_probs, cfg).mean().item() == pytest.approx(1.0, abs=1e-12)


def test_a_global_mean_makes_shards_agree():
    batch = random_batch(1)
    cfg = replace(WIDE, normalize="batch_mean")
    halves = [batch.rows(slice(0, 3)), batch.rows(slice(3, None))]
    total, count = sum(weight_sum_and_count(h.log_probs, cfg, h.mask) for h in halves)
    context = TokenContext(mean_weight=total / count)
    shards = [token_weights(h.log_probs, cfg, h.mask, context=context) for h in halves]
    whole = token_weights(batch.log_probs, cfg, batch.mask)
    assert torch.allclose(torch.cat(shards), whole, rtol=0, atol=1e-12)
    local = [token_weights(h.log_probs, cfg, h.mask) for h in halves]
    assert not torch.allclose(torch.cat(local), whole, rtol=0, atol=1e-6)


def test_nothing_to_normalise_is_finite():
    cfg = replace(WIDE, normalize="batch_mean")
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert bool(token_weights(torch.full((2, 3), -1.0), cfg, empty).isfinite().all())
    zero = GrpoSG(lower=0.0, upper=0.0, normalize="batch_mean", allow_constant=True)
    assert torch.equal(token_weights(torch.full((2, 3), -1.0), zero), torch.zeros(2, 3))


# --- properties --------------------------------------------------------------------------------

finite = {"allow_nan": False, "allow_infinity": False}
bounds = st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)).map(sorted)


@st.composite
def configs(draw, forms=("product", "quotient"), least_alpha=-4.0):
    lower, upper = draw(bounds)
    return draw(st.sampled_from([GrpoSG, Reverse]))(
        form=draw(st.sampled_from(forms)),
        alpha=draw(st.floats(least_alpha, 4.0)),
        mu=draw(st.floats(-1.0, 1.0)),
        tau=draw(st.floats(0.01, 50.0)),
        lower=lower,
        upper=upper,
        placement=draw(st.sampled_from(["inside", "outside"])),
        allow_constant=True,
    )


log_prob_lists = st.lists(st.floats(-200.0, 0.0), min_size=1, max_size=20)


@PROPERTY
@given(cfg=configs(), log_probs=log_prob_lists)
def test_property_within_bounds(cfg, log_probs):
    weights = token_weights(torch.tensor(log_probs, dtype=torch.float64), cfg)
    lower, upper = cfg.lower, cfg.upper
    if isinstance(cfg, Reverse):
        lower, upper = 2.0 - upper, 2.0 - lower
    assert bool(((weights >= lower) & (weights <= upper)).all())
    low, high = cfg.bounds()
    assert bool(((weights >= low - 1e-12) & (weights <= high + 1e-12)).all())


@PROPERTY
@given(cfg=configs(forms=("product",), least_alpha=0.0), log_probs=log_prob_lists)
def test_property_monotone_in_p(cfg, log_probs):
    ordered = torch.tensor(sorted(log_probs), dtype=torch.float64)
    steps = token_weights(ordered, cfg).diff()
    assert bool((steps <= 0).all() if isinstance(cfg, Reverse) else (steps >= 0).all())


@PROPERTY
@given(cfg=configs(), p=st.floats(1e-3, 1.0), eps_high=st.floats(0.0, 0.5))
def test_property_outside_has_no_dead_zone(cfg, p, eps_high):
    outside = replace(cfg, placement="outside")
    assert first_dead(outside, eps_high) is None
    weight = token_weights(torch.tensor([[p]], dtype=torch.float64).log(), outside).item()
    assert policy_gradient_at(p, +1.0, outside) == pytest.approx(-weight, abs=1e-12)


def test_gradient_vanishes_above_the_dual_clip():
    cfg = GrpoSG(alpha=20.0, upper=15.0)
    first, last = dual_clip_zone(cfg, 10.0)
    assert (first, last) == (pytest.approx(math.log(3) / 9, abs=1e-9), 1.0)  # sigmoid = 0.75
    for p, is_dead in ((first - 1e-7, False), (first + 1e-7, True), (0.999, True)):
        log_p = torch.tensor([[math.log(p)]], dtype=torch.float64, requires_grad=True)
        mask = torch.ones(1, 1)
        loss = policy_loss(
            log_p, log_p.detach(), -mask, mask, LossSettings(cfg, 0.2, 0.24, 10.0)
        ).loss
        assert (torch.autograd.grad(loss, log_p)[0].item() == 0.0) == is_dead
    assert dual_clip_zone(cfg, None) is None and dual_clip_zone(PUBLISHED, 10.0) is None
    assert dual_clip_zone(replace(cfg, placement="outside"), 10.0) is None


def test_mean_over_uniform_p():
    leaves, meets = math.log(3) / 9, math.log(19) / 9  # w = 1 and w = 1.4
    rising = 2 / 9 * math.log(20 / 4) - (meets - leaves) / 2
    published = leaves + rising + 1.4 * (1 - meets)
    assert PUBLISHED.uniform_mean() == pytest.approx(published, abs=1e-9)
    assert reverse_of(PUBLISHED).uniform_mean() == pytest.approx(2 - published)
    assert PRINTED_EQ19.uniform_mean() == pytest.approx(1.0)
    ar = AdvantageReweighting(alpha=0.3)
    assert ar.uniform_mean() == pytest.approx(0.85)  # of 0.3 p + 0.7
    assert Random().uniform_mean() == 1.0
    assert Stapo().uniform_mean() is None
