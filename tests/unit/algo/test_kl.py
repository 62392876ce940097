"""KL estimators: upstream's bits for the plain ones, the weighted ones by hand and at limits."""

import itertools
import math

import pytest
import torch

from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.token_weights import token_weights
from tests.unit.algo import upstream
from tests.unit.algo.batches import WIDE, gradient, same_bits


def log_prob_pairs(dtype=torch.float64, scale=1.0):
    """(log p, log p_ref, log p_old), far apart enough to reach every limit when scale is 12."""
    generator = torch.Generator().manual_seed(0)
    log_p = -torch.randn(6, 40, generator=generator, dtype=torch.float64).abs() * 2
    ref = log_p + scale * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    old = log_p + scale * 0.3 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    return log_p.to(dtype).requires_grad_(), ref.to(dtype), old.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_plain_estimators_are_upstream_bit_for_bit(estimator, dtype, unbiased):
    theirs = upstream.compute_approx_kl()
    for scale, with_old in itertools.product((0.1, 1.0, 12.0, 60.0), (False, True)):
        log_p, ref, old = log_prob_pairs(dtype, scale)
        old = old if with_old else None
        expected = theirs(log_p, ref, old, estimator, unbiased)
        for weights in (None, torch.full_like(ref, 1.3)):  # a plain estimator ignores the weights
            kl = kl_estimate(
                log_p, ref, weights, estimator, old_log_probs=old, unbiased_gradient=unbiased
            )
            assert same_bits(kl, expected)
            assert same_bits(gradient(kl.sum(), log_p), gradient(expected.sum(), log_p))


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_weight_one_makes_wk3_into_k3(unbiased, scale):
    log_p, ref, old = log_prob_pairs(torch.float32, scale)
    ones = torch.ones_like(ref)
    options = {"old_log_probs": old, "unbiased_gradient": unbiased}
    k3 = kl_estimate(log_p, ref, estimator="k3", **options)
    wk3 = kl_estimate(log_p, ref, ones, "wk3", **options)
    assert same_bits(wk3, k3)
    assert same_bits(gradient(wk3.sum(), log_p), gradient(k3.sum(), log_p))
    if not unbiased:
        eq11 = kl_estimate(log_p, ref, ones, "wk3_eq11")
        assert same_bits(eq11, k3)
        assert same_bits(gradient(eq11.sum(), log_p), gradient(k3.sum(), log_p))


def test_values_and_gradients_by_hand():
    log_p, ref, old = log_prob_pairs()
    weights = token_weights(log_p, WIDE)
    d = (log_p - ref).detach()
    rho = (-d).exp()
    expected = {
        "k1": (d, torch.ones_like(d)),
        "k2": (d**2 / 2, d),
        "k3": (rho - rho.log() - 1, 1 - rho),
        "wk3": (weights * (rho - rho.log() - 1), weights * (1 - rho)),
        "wk3_eq11": (weights * rho - (weights * rho).log() - 1, 1 - weights * rho),
    }
    for estimator, (value, slope) in expected.items():
        inside = value.abs() < 10
        assert inside.float().mean() > 0.9
        kl = kl_estimate(log_p, ref, weights, estimator)
        assert torch.allclose(kl[inside], value[inside], rtol=1e-12, atol=1e-12), estimator
        actual = gradient(kl.sum(), log_p)
        assert torch.allclose(actual[inside], slope[inside], rtol=1e-12, atol=1e-12), estimator
    is_weight = (log_p - old).detach().exp().clamp(max=10)
    kl = kl_estimate(log_p, ref, weights, "wk3", old_log_probs=old, unbiased_gradient=True)
    assert torch.allclose(kl, kl_estimate(log_p, ref, weights, "wk3"), rtol=1e-12, atol=1e-12)
    slope = gradient(kl.sum(), log_p)
    assert torch.allclose(slope, weights * is_weight * d, rtol=1e-12, atol=1e-12)


def test_where_the_two_weighted_forms_have_their_minimum():
    for w in (0.5, 1.0, 1.4):
        weights = torch.tensor([w], dtype=torch.float64)
        for rho, zero in ((1.0, "wk3"), (1 / w, "wk3_eq11")):
            log_p = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
            ref = log_p.detach() + math.log(rho)
            kl = kl_estimate(log_p, ref, weights, zero)
            assert kl.item() == pytest.approx(0.0, abs=1e-12)
            assert gradient(kl.sum(), log_p).item() == pytest.approx(0.0, abs=1e-12)
            if w != 1.0:
                other = "wk3_eq11" if zero == "wk3" else "wk3"
                at_zero = kl_estimate(log_p, ref, weights, other)
                assert at_zero.item() > 0.05
                assert abs(gradient(at_zero.sum(), log_p).item()) > 0.2


def test_wk3_is_the_weight_times_k3_even_at_the_limits():
    log_p, ref, _ = log_prob_pairs(torch.float32, scale=15.0)
    weights = token_weights(log_p, WIDE)
    k3 = kl_estimate(log_p, ref, estimator="k3")
    wk3 = kl_estimate(log_p, ref, weights, "wk3")
    assert bool((k3 == 10.0).any()) and bool((k3 < 10.0).any())
    assert torch.equal(wk3, weights * k3)
    expected = weights * gradient(k3.sum(), log_p)
    assert torch.allclose(gradient(wk3.sum(), log_p), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "wk3", "wk3_eq11"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_extremes_are_finite_in_value_and_gradient(estimator, dtype):
    extremes = torch.tensor([0.0, 1e-6, -1e-3, -50.0, -1e4, -1e30], dtype=dtype)
    log_p, ref = torch.meshgrid(extremes, extremes, indexing="ij")
    log_p = log_p.clone().requires_grad_()
    weights = torch.full_like(ref, 1.4, dtype=torch.float32)
    kl = kl_estimate(log_p, ref, weights, estimator)
    assert bool(kl.isfinite().all()) and kl.abs().max() <= 14.0
    assert bool(gradient(kl.sum(), log_p).isfinite().all())
    assert kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_zero_weights_are_finite():
    log_p, ref, _ = log_prob_pairs()
    for estimator in ("wk3", "wk3_eq11"):
        kl = kl_estimate(log_p, ref, torch.zeros_like(ref), estimator)
        assert bool(kl.isfinite().all())
        assert bool(gradient(kl.sum(), log_p).isfinite().all())


def test_weights_pass_no_gradient():
    log_p, ref, _ = log_prob_pairs()
    weights = torch.full_like(ref, 1.2).requires_grad_()
    kl_sum = kl_estimate(log_p, ref, weights, "wk3").sum()
    assert torch.autograd.grad(kl_sum, weights, allow_unused=True)[0] is None


def test_refusals():
    log_p, ref, _ = log_prob_pairs()
    weights = torch.ones_like(ref)
    with pytest.raises(ValueError, match="'k4': expected one of k1, k2, k3, wk3, wk3_eq11"):
        kl_estimate(log_p, ref, weights, "k4")
    for estimator in ("wk3", "wk3_eq11"):
        with pytest.raises(ValueError, match=f"estimator='{estimator}': expected token weights"):
            kl_estimate(log_p, ref, None, estimator)
    with pytest.raises(ValueError, match="unbiased_gradient=True: expected another estimator"):
        kl_estimate(log_p, ref, weights, "wk3_eq11", unbiased_gradient=True)


def test_unbiased_gradient_is_that_of_the_kl():
    """Averaged over a softmax's samples it is the exact KL's gradient; k3's own is not."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    log_ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_old = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    exact = gradient((log_p.exp() * (log_p - log_ref)).sum(), logits)
    cases = (("k3", True, True), ("wk3", True, True), ("k3", False, False))
    for estimator, unbiased, agrees in cases:
        kl = kl_estimate(
            log_p,
            log_ref,
            torch.ones(5, dtype=torch.float64),
            estimator,
            old_log_probs=log_old,
            unbiased_gradient=unbiased,
        )
        expected = gradient((log_old.exp() * kl).sum(), logits)
        assert torch.allclose(expected, exact, rtol=1e-9, atol=1e-12) is agrees
