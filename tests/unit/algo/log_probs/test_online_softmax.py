"""Log-probs and gradients block by block equal those over all logits."""

from __future__ import annotations

import pytest
import torch

from sg_rlhf.algo.log_probs import fused_log_probs
from sg_rlhf.algo.log_probs.fused_log_probs import selected_log_probs
from sg_rlhf.algo.log_probs.online_softmax import TORCH_KERNEL, BlockKernel
from tests.unit.algo.log_probs.test_fused_log_probs import (
    GRADIENT,
    VALUE,
    assert_near,
    gradients,
    problem,
    reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _block_by_block(monkeypatch):
    monkeypatch.setattr(fused_log_probs, "_KEPT", 0)
    monkeypatch.setattr(fused_log_probs, "_ROWS", {"cpu": 3, "cuda": 3})


@pytest.fixture
def kernel() -> BlockKernel:
    """Replaced by the tests of the other kernel (test_triton_softmax.py)."""
    return TORCH_KERNEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("trained_entropy", [False, True])
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, None), (0.7, 7)])
def test_values_and_gradients(kernel, dtype, trained_entropy, temperature, chunk):
    inputs = [
        x.detach().to(DEVICE).requires_grad_(x.is_floating_point())
        for x in problem(n=7, h=8, v=33, dtype=dtype)
    ]
    ours = selected_log_probs(
        *inputs[:2],
        inputs[3],
        bias=inputs[2],
        temperature=temperature,
        with_entropy=True,
        chunk=chunk,
        kernel=kernel,
    )
    theirs = reference(*inputs, temperature)
    for mine, expected in zip(ours, theirs, strict=True):
        assert_near(mine, expected, VALUE[dtype])
    count = 1 + trained_entropy
    of_ours, of_theirs = (gradients(x[:count], inputs[:3]) for x in (ours, theirs))
    for mine, expected in zip(of_ours, of_theirs, strict=True):
        assert_near(mine, expected, GRADIENT[dtype])


def test_ruled_out_and_nan_and_no_target(kernel):
    """-inf for whole blocks, NaN in a row, a target that is none of the vocabulary."""
    hidden, weight, bias, targets = (x.detach().to(DEVICE) for x in problem(dtype=torch.float32))
    bias[:20] = -torch.inf
    hidden[2, 3] = torch.nan
    targets[:] = torch.tensor([20, 3, 21, -100, 32])
    hidden.requires_grad_()
    log_probs, entropy = selected_log_probs(
        hidden, weight, targets, bias=bias, with_entropy=True, chunk=8, kernel=kernel
    )
    assert log_probs[1] == -torch.inf
    assert log_probs.isnan().tolist() == [False, False, True, True, False]
    assert entropy.isnan().tolist() == [False, False, True, False, False]
    allowed = reference(hidden[[0, 4]], weight[20:], bias[20:], targets[[0, 4]] - 20)
    for mine, expected in zip((log_probs, entropy), allowed, strict=True):
        assert_near(mine[[0, 4]], expected, 1e-5)
    weight.requires_grad_()
    (log_probs,) = selected_log_probs(
        hidden, weight, targets, bias=bias, with_entropy=True, chunk=8, kernel=kernel
    )[:1]
    (of_ours,) = torch.autograd.grad(log_probs[[0, 4]].sum(), hidden)
    (of_theirs,) = torch.autograd.grad(
        reference(hidden[[0, 4]], weight[20:], bias[20:], targets[[0, 4]] - 20)[0].sum(), hidden
    )
    assert_near(of_ours[[0, 4]], of_theirs[[0, 4]], 1e-5)


def test_no_rows(kernel):
    hidden, weight, _, targets = (x.to(DEVICE) for x in problem(n=1, dtype=torch.float32))
    ours = selected_log_probs(hidden[:0], weight, targets[:0], with_entropy=True, kernel=kernel)
    assert [len(x) for x in ours] == [0, 0]
    (gradient,) = gradients(ours, [weight])
    assert not gradient.any()
