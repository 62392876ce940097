"""The mean of the weighted score function (docs/method.md, "The weight is not neutral")."""

import pytest
import torch
from torch import Tensor

from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from tests.unit.algo.batches import PUBLISHED, UNIFORM

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
