"""The gradients of single tokens."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.measure.token_gradient_norms import (
    logit_gradient_norms,
    token_gradient_norms,
    token_gradients,
)
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from tests.unit.algo.batches import PROPERTY, PUBLISHED, UNIFORM

# -- Token gradients: closed form of a linear softmax model, autograd at the logits, the bound ---


def random_logits(seed, tokens=6, vocabulary=9, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    return logits, torch.randint(vocabulary, (tokens,), generator=generator)


@given(st.integers(0, 10_000), st.floats(0.0, 30.0), st.integers(2, 40))
@PROPERTY
def test_at_the_logits_the_bound_of_the_proof_holds(seed, scale, vocabulary):
    logits, targets = random_logits(seed, vocabulary=vocabulary, scale=scale)
    rest, norm = logit_gradient_norms(logits, targets)
    assert bool((rest <= norm * (1 + 1e-12)).all())
    assert bool((norm <= math.sqrt(2) * rest * (1 + 1e-12)).all())
    assert bool((rest >= 0).all()) and bool((rest <= 1 + 1e-12).all())


def test_at_the_logits_it_is_autograds_norm():
    logits, targets = random_logits(1)
    logits.requires_grad_()
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    rest, norm = logit_gradient_norms(logits, targets)
    for token in range(len(targets)):
        (gradient,) = torch.autograd.grad(log_probs[token], logits, retain_graph=True)
        assert norm[token].item() == pytest.approx(gradient.norm().item(), rel=1e-12)
        p = log_probs[token].exp().item()
        assert rest[token].item() == pytest.approx(1 - p, rel=1e-9)


def test_a_sure_token_keeps_its_digits():
    """1 - p as a difference would be 0 here."""
    rest, norm = logit_gradient_norms(torch.tensor([[50.0, 0.0, 0.0]]), torch.tensor([0]))
    small = math.exp(-50)
    assert rest.item() == pytest.approx(2 * small, rel=1e-9)
    assert norm.item() == pytest.approx(small * math.sqrt(4 + 2), rel=1e-9)


@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
def test_a_linear_softmax_model_in_closed_form(chunk):
    """h = W x + b: the gradient is (e_y - pi) x^T and e_y - pi, so its norm is a product."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(9, 5, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    unused = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (7,), generator=generator)
    logits = F.linear(x, weight, bias)
    log_probs = -F.cross_entropy(logits, targets, reduction="none")
    found = token_gradient_norms(log_probs, [weight, bias, unused], chunk=chunk)
    _, at_logits = logit_gradient_norms(logits, targets)
    expected = at_logits * (x.square().sum(1) + 1).sqrt()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    assert weight.grad is None


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_sum_of_directions_is_that_of_single_gradients(chunk):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    x[2] = 0.0  # a token whose gradient is 0
    weight = torch.randn(9, 4, generator=generator, dtype=torch.float64).requires_grad_()
    scale = torch.tensor([1.0, -1.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    log_probs = F.linear(x, weight).log_softmax(-1)[:, 0]
    norms, direction = token_gradients(log_probs, [weight], scale, chunk=chunk)
    expected = torch.zeros(weight.numel(), dtype=torch.float64)
    for token, factor in enumerate(scale):
        (gradient,) = torch.autograd.grad(log_probs[token], weight, retain_graph=True)
        assert norms[token].item() == pytest.approx(gradient.norm().item(), rel=1e-12)
        if token != 2:
            expected += factor * gradient.flatten() / gradient.norm()
    torch.testing.assert_close(direction, expected, rtol=1e-12, atol=1e-12)


def test_chunks_are_counted_from_one():
    with pytest.raises(ValueError, match="chunk=0: expected 1 or more"):
        token_gradient_norms(torch.zeros(1, requires_grad=True), [], chunk=0)


# -- The mean of the weighted score function (docs/method.md, "The weight is not neutral") -------


ALPHA, MU, TAU = 2.0, 0.25, 9.0
#: Eq. 19 with the product form and no clip: its integral W has a closed form.
UNCLIPPED = GrpoSG(lower=0.0, upper=10.0, allow_constant=True)


def policies(count: int, words: int = 12) -> list[Tensor]:
    """Logits of random policies over a vocabulary, float64."""
    random = torch.Generator().manual_seed(0)
    return [
        (1.5 * torch.randn(words, generator=random, dtype=torch.float64)).requires_grad_()
        for _ in range(count)
    ]


def mean_of_score(logits: Tensor, cfg: object) -> Tensor:
    """E[w grad log pi] over the policy's own tokens, exact: a sum over the vocabulary."""
    log_probs = logits.log_softmax(0)
    coefficients = log_probs.exp().detach() * token_weights(log_probs.detach(), cfg)
    return torch.autograd.grad((coefficients * log_probs).sum(), logits)[0]


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits)[0]


def test_it_is_the_gradient_of_the_sum_of_the_weights_integrals():
    """W(p) = alpha (log((1 + e^(tau p)) / 2) / tau - mu p), so that W' = w and W(0) = 0."""
    for logits in policies(20):
        p = logits.softmax(0)
        integrals = ALPHA * (((1 + (TAU * p).exp()) / 2).log() / TAU - MU * p)
        expected = gradient(integrals.sum(), logits)
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(mean_of_score(logits, UNCLIPPED), expected)


def test_it_is_zero_for_equal_weights():
    for logits in policies(20):
        assert mean_of_score(logits, UNIFORM).abs().max() < 1e-15


@pytest.mark.parametrize("cfg", [PUBLISHED, UNCLIPPED], ids=["published", "unclipped"])
def test_a_weight_that_rises_with_p_points_to_less_entropy(cfg):
    cosines = []
    for logits in policies(200):
        p = logits.softmax(0)
        of_entropy = gradient(-(p * p.log()).sum(), logits)
        cosines.append(torch.cosine_similarity(mean_of_score(logits, cfg), of_entropy, dim=0))
    found = torch.stack(cosines)
    assert found.max() < -0.5
    assert found.mean() < -0.9
