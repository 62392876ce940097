"""The weighted loss's gradient: Lemma 3.4 in closed form, clip boundaries, finite differences."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from tests.unit.algo.batches import (
    PUBLISHED,
    QUOTIENT,
    WIDE,
    gradient,
    loss_and_metrics,
    random_batch,
    weight_by_hand,
)

EPS_LOW, EPS_HIGH, BETA = 0.2, 0.24, 0.1


def closed_form(log_p, old, advantage, cfg, dual_clip, log_ref) -> float:
    """d(J - BETA * wk3) / d log pi of one token, in plain Python.

    Lemma 3.4 for placement inside, w (r A I + beta rho - beta); outside, the same with the
    indicator read at r instead of w r. Dual clip adds a zero where A < 0 and x > dual_clip.
    """
    weight = weight_by_hand(math.exp(log_p), cfg)
    ratio, rho = math.exp(log_p - old), math.exp(log_ref - log_p)
    x = weight * ratio if cfg.placement == "inside" else ratio
    trusted = not (advantage > 0 and x > 1 + EPS_HIGH) and not (advantage < 0 and x < 1 - EPS_LOW)
    if dual_clip is not None and advantage < 0 and x > dual_clip:
        trusted = False
    return weight * (ratio * advantage * trusted + BETA * rho - BETA)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("cfg", [PUBLISHED, WIDE, QUOTIENT], ids=["published", "wide", "quotient"])
def test_gradient_is_lemma_3_4(cfg, placement, dual_clip):
    cfg = replace(cfg, placement=placement)
    zeros = moving = 0
    for seed in range(5):
        batch = random_batch(seed, rows=12, tokens=20)
        ref = batch.old_log_probs + 0.3 * batch.advantages.roll(1, dims=-1)
        terms = policy_loss(*batch.tensors, LossSettings(cfg, EPS_LOW, EPS_HIGH, dual_clip))
        kl = kl_estimate(batch.log_probs, ref, terms.weights_BT, "wk3")
        loss = terms.loss + BETA * aggregate(kl, batch.mask)
        actual = -gradient(loss, batch.log_probs) * batch.mask.sum()
        policy_part = gradient(terms.loss, batch.log_probs)
        for index in batch.mask.nonzero().tolist():
            at = tuple(index)
            token = [batch.log_probs[at], batch.old_log_probs[at], batch.advantages[at]]
            values = [value.item() for value in token]
            expected = closed_form(*values, cfg, dual_clip, ref[at].item())
            assert actual[at].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
            if batch.advantages[at] != 0:
                zeros += policy_part[at].item() == 0.0
                moving += policy_part[at].item() != 0.0
        assert torch.equal(actual[~batch.mask], torch.zeros_like(actual[~batch.mask]))
    assert zeros > 20 and moving > 100  # both branches of the indicator were visited


@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("cfg", [PUBLISHED, WIDE], ids=["published", "wide"])
def test_without_the_stop_gradient_the_weights_own_gradient_counts(cfg, placement):
    cfg = replace(cfg, placement=placement, stop_gradient=False)
    steep = 0
    for seed in range(3):
        batch = random_batch(seed, rows=12, tokens=20)
        terms = policy_loss(*batch.tensors, LossSettings(cfg, EPS_LOW, EPS_HIGH))
        assert not terms.weights_BT.requires_grad
        actual = -gradient(terms.loss, batch.log_probs) * batch.mask.sum()
        for index in batch.mask.nonzero().tolist():
            at = tuple(index)
            p, advantage = math.exp(batch.log_probs[at].item()), batch.advantages[at].item()
            ratio = p / math.exp(batch.old_log_probs[at].item())
            sigmoid = 1 / (1 + math.exp(-cfg.tau * p))
            weight = cfg.alpha * (sigmoid - cfg.mu)
            varies = cfg.lower < weight < cfg.upper
            weight = min(max(weight, cfg.lower), cfg.upper)
            slope = p * cfg.alpha * cfg.tau * sigmoid * (1 - sigmoid) * varies  # p dw/dp
            x = weight * ratio if placement == "inside" else ratio
            held = (advantage > 0 and x > 1 + EPS_HIGH) or (advantage < 0 and x < 1 - EPS_LOW)
            if placement == "inside":
                expected = 0.0 if held else (weight + slope) * ratio * advantage
            else:
                clipped = min(max(ratio, 1 - EPS_LOW), 1 + EPS_HIGH)
                least = min(ratio * advantage, clipped * advantage)
                expected = slope * least + (0.0 if held else weight * ratio * advantage)
            assert actual[at].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
            steep += varies and not held
    assert steep > 20


@pytest.mark.parametrize("other", [{"normalize": "batch_mean"}, {"probability": "engine"}])
def test_a_weight_that_is_no_function_of_the_current_p_keeps_the_stop_gradient(other):
    with pytest.raises(ParameterError, match="stop_gradient=False: expected true with"):
        GrpoSG(stop_gradient=False, **other)


def single_token(log_p, ratio, advantage, cfg, dual_clip=None):
    """d J / d log pi of one token, by autograd."""
    log_probs = torch.tensor([[log_p]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[log_p - math.log(ratio)]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = loss_and_metrics(
        log_probs, old, advantages, mask, LossSettings(cfg, EPS_LOW, EPS_HIGH, dual_clip)
    )
    return -gradient(loss, log_probs).item(), metrics


@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("cfg", [PUBLISHED, WIDE, QUOTIENT], ids=["published", "wide", "quotient"])
@pytest.mark.parametrize(("advantage", "edge"), [(1.5, 1 + EPS_HIGH), (-1.5, 1 - EPS_LOW)])
def test_both_sides_of_the_clip(cfg, placement, advantage, edge):
    cfg = replace(cfg, placement=placement)
    for p in (0.02, 0.2, 0.6, 0.97):
        weight = weight_by_hand(p, cfg)
        boundary = edge / weight if placement == "inside" else edge
        outward = 1.0 if advantage > 0 else -1.0
        within, metrics = single_token(math.log(p), boundary * (1 - outward * 1e-9), advantage, cfg)
        assert within == pytest.approx(weight * boundary * advantage, rel=1e-6)
        assert metrics["zeroed_pos"] == metrics["zeroed_neg"] == 0.0
        beyond, metrics = single_token(math.log(p), boundary * (1 + outward * 1e-9), advantage, cfg)
        assert beyond == 0.0
        assert metrics["zeroed_pos" if advantage > 0 else "zeroed_neg"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("advantage", "weight"), [(2.0, 1.25), (-2.0, 0.75)])
def test_exactly_at_the_boundary_the_gradient_is_full(dtype, advantage, weight):
    """As in Lemma 3.4, whose inequalities are strict: a token at the boundary is trusted."""
    bound = {"lower": weight, "upper": weight, "allow_constant": True}
    # r = 1: w is the boundary of a clip by 0.25, and r itself that of a clip without room.
    for placement, eps in (("inside", 0.25), ("outside", 0.0)):
        cfg = GrpoSG(placement=placement, **bound)
        log_probs = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
        advantages = torch.tensor([[advantage]], dtype=dtype)
        mask = torch.ones(1, 1, dtype=torch.bool)
        loss, metrics = loss_and_metrics(
            log_probs, log_probs.detach(), advantages, mask, LossSettings(cfg, eps, eps)
        )
        assert -gradient(loss, log_probs).item() == weight * advantage
        assert metrics["clip_ratio"] == 0.0


def test_exactly_at_the_dual_clip_half_the_gradient_remains():
    cfg = GrpoSG(lower=1.5, upper=1.5, allow_constant=True)
    at, metrics = single_token(-1.0, 1.0, -2.0, cfg, dual_clip=1.5)
    assert at == 0.5 * 1.5 * -2.0 and metrics["dual_clip_ratio"] == 0.0
    below, _ = single_token(-1.0, 1.0, -2.0, cfg, dual_clip=1.5 + 1e-9)
    assert below == 1.5 * -2.0
    beyond, metrics = single_token(-1.0, 1.0, -2.0, cfg, dual_clip=1.5 - 1e-9)
    assert beyond == 0.0 and metrics["dual_clip_ratio"] == metrics["zeroed_neg"] == 1.0


def test_dual_clip_must_exceed_one():
    with pytest.raises(ValueError, match=r"dual_clip=1\.0: expected a number above 1"):
        LossSettings(PUBLISHED, EPS_LOW, EPS_HIGH, 1.0)


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_value_by_hand(placement):
    """One token per case, dual clip 3: the surrogate itself, not only its gradient."""
    cfg = replace(WIDE, placement=placement)
    weight = weight_by_hand(0.2, cfg)
    for ratio, advantage in itertools.product((0.3, 0.7, 1.0, 1.3, 8.0), (-1.5, 0.0, 2.0)):
        log_p = torch.tensor([[math.log(0.2)]], dtype=torch.float64)
        old = log_p - math.log(ratio)
        loss = policy_loss(
            log_p,
            old,
            torch.full((1, 1), advantage),
            torch.ones(1, 1),
            LossSettings(cfg, 0.2, 0.24, 3.0),
        ).loss
        x = weight * ratio if placement == "inside" else ratio
        value = min(x * advantage, min(max(x, 0.8), 1.24) * advantage)
        if advantage < 0:
            value = max(value, 3.0 * advantage)
        expected = value if placement == "inside" else weight * value
        assert -loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_gradient_by_finite_differences(placement, mean):
    """Central differences with the weights held, which is what stop-gradient means."""
    cfg = replace(WIDE, placement=placement)
    batch = random_batch(4, rows=4, tokens=5)
    settings = LossSettings(cfg, EPS_LOW, EPS_HIGH, 10.0, aggregation=mean)
    loss = policy_loss(*batch.tensors, settings).loss
    analytic = gradient(loss, batch.log_probs)
    weights = policy_loss(*batch.tensors, LossSettings(cfg, EPS_LOW, EPS_HIGH)).weights_BT
    step = 1e-6

    def with_held_weights(log_probs):
        ratio = (log_probs - batch.old_log_probs).exp()
        x = weights * ratio if placement == "inside" else ratio
        value = torch.min(x * batch.advantages, x.clamp(0.8, 1.24) * batch.advantages)
        value = torch.where(batch.advantages < 0, value.max(10.0 * batch.advantages), value)
        value = value if placement == "inside" else weights * value
        if mean == "token-mean":
            return -(value * batch.mask).sum() / batch.mask.sum()
        rows = [v[m].mean() for v, m in zip(value, batch.mask, strict=True) if m.any()]
        return -sum(rows) / len(rows)

    base = batch.log_probs.detach()
    assert with_held_weights(base).item() == pytest.approx(loss.item(), rel=1e-7)
    for index in itertools.product(range(4), range(5)):
        up, down = base.clone(), base.clone()
        up[index] += step
        down[index] -= step
        slope = (with_held_weights(up) - with_held_weights(down)) / (2 * step)
        assert analytic[index].item() == pytest.approx(slope.item(), abs=1e-6)
