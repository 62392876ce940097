"""Muon: orthogonalised steps, and the same update as torch's bf16 implementation."""

import pytest
import torch

from sg_rlhf.tiny.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_singular_values_become_nearly_one(shape):
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.linspace(0.1, 1.0, min(shape))
    before = (u * values) @ v
    after = orthogonalise(before)
    singular = torch.linalg.svdvals(after)
    # The iteration trades accuracy for speed: its fixed band is about 0.7 to 1.2.
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    # The directions stay: u^T after v is diagonal.
    inner = u.T @ after @ v.T
    torch.testing.assert_close(inner, inner.diag().diag(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_same_update_as_torch(shape):
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    optimizers = [Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)]
    for _ in range(3):
        grad = torch.randn(shape)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - start).norm()
    # bf16 has 8 bits: the two differ by about 1 % of the way.
    assert (ours - theirs).norm() < 0.03 * moved


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="Muon updates matrices"):
        Muon([torch.zeros(3, requires_grad=True)])
