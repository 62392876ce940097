"""AdamW's step: torch's own to rounding, by hand, and what a factor of the gradient does to it."""

import pytest
import torch

from lab.measure.adamw import AdamW, Moments

LR = 0.01


def gradients(count, size=50):
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(count, size, generator=generator, dtype=torch.float64)
    # Coordinates of very different sizes, and one that has no gradient, as an unused embedding.
    drawn *= torch.logspace(-6, 0, size, dtype=torch.float64)
    drawn[:, 0] = 0.0
    return drawn


def update(parts, optimizer):
    moments = Moments(optimizer)
    for part in parts[:-1]:
        moments.add(part)
    return moments.update(parts[-1])


def torch_update(parts, optimizer):
    param = torch.nn.Parameter(torch.zeros_like(parts[0]))
    theirs = torch.optim.AdamW(
        [param], lr=LR, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.0
    )
    before = param.detach().clone()
    for part in parts:
        before = param.detach().clone()
        param.grad = part.clone()
        if optimizer.max_norm:
            torch.nn.utils.clip_grad_norm_([param], optimizer.max_norm)
        theirs.step()
    return (before - param.detach()) / LR


@pytest.mark.parametrize("max_norm", [None, 0.0, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_it_is_torchs_step(steps, max_norm):
    parts = gradients(steps)
    norms = parts.norm(dim=1)
    if max_norm == 2.0:
        assert steps < 30 or bool((norms > 2).any() and (norms < 2).any())
    optimizer = AdamW(max_norm=max_norm)
    expected = torch_update(parts, optimizer)
    torch.testing.assert_close(update(parts, optimizer), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("factor", [0.5, 1.4, 100.0])
def test_a_factor_of_every_gradient_cancels(factor):
    parts = gradients(20)
    plain, scaled = (update(c * parts, AdamW(max_norm=None, eps=1e-12)) for c in (1.0, factor))
    torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-6)
    assert float(plain.norm()) > 1


def test_a_factor_counts_where_the_clip_takes_it_from_some_of_them():
    """Norms 1 and 3 under a clip of 2 are 1 and 2; twice as long they are 2 and 2."""
    parts = torch.tensor([[0.6, 0.8], [3.0, 0.0]], dtype=torch.float64)
    optimizer = AdamW(max_norm=2.0)
    for factor, norms in ((1.0, (1.0, 2.0)), (2.0, (2.0, 2.0))):
        cut = torch.stack([p / p.norm() * n for p, n in zip(parts, norms, strict=True)])
        expected = update(cut, AdamW(max_norm=None))
        found = update(factor * parts, optimizer)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    one, two = (update(factor * parts, optimizer) for factor in (1.0, 2.0))
    assert float((one - two).norm()) > 0.05
    assert [optimizer.clips(norm) for norm in (1.0, 2.0, 2.1)] == [False, False, True]


def test_an_update_leaves_the_moments_and_the_gradient():
    parts = gradients(4)
    moments = Moments(AdamW())
    moments.add(parts[0])
    kept = parts.clone()
    first = moments.update(parts[1])
    assert moments.steps == 1
    torch.testing.assert_close(moments.update(parts[1]), first, rtol=0, atol=0)
    moments.add(parts[2])
    torch.testing.assert_close(parts, kept, rtol=0, atol=0)
    assert moments.steps == 2
