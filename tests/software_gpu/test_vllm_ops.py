"""vLLM's operators on the software GPU equal their formulas, in float64 where they are sums."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

if os.environ.get("SOFTWARE_GPU_VALUES") != "1":
    pytest.skip("needs the software GPU with values", allow_module_level=True)

from torch import Tensor  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402

CLOSE = {"rtol": 1.6e-2, "atol": 1e-2}  # bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu().double(), expected.double(), **CLOSE)


def expected_norm(x: Tensor, weight: Tensor) -> Tensor:
    full = x.double()
    return full / (full.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def test_rms_norm() -> None:
    x, weight = normal(5, 16), normal(16, seed=1)
    result = torch.empty_like(x, device="cuda")
    ops.rms_norm(result, x.cuda(), weight.cuda(), 1e-6)
    check(result, expected_norm(x, weight))


def test_fused_add_rms_norm() -> None:
    x, residual, weight = normal(5, 16), normal(5, 16, seed=1), normal(16, seed=2)
    there, sums = x.cuda(), residual.cuda()
    ops.fused_add_rms_norm(there, sums, weight.cuda(), 1e-6)
    check(sums, x.double() + residual.double())
    check(there, expected_norm(x + residual, weight))


def test_silu_and_mul() -> None:
    x = normal(5, 12)
    result = torch.empty(5, 6, dtype=x.dtype, device="cuda")
    torch.ops._C.silu_and_mul(result, x.cuda())
    gate, up = x.double().chunk(2, -1)
    check(result, gate / (1 + (-gate).exp()) * up)


def test_rotary_embedding() -> None:
    """Each pair (i, i + size / 2) of a head is a complex number, multiplied by exp(i angle)."""
    size, tokens = 8, 5
    positions = torch.tensor([0, 3, 1, 7, 2])
    angles = torch.arange(10)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    cache = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    # As vLLM's: parts of one projection.
    projection = normal(tokens, 6 * size).cuda()
    query, key = projection[:, : 2 * size], projection[:, 2 * size : 3 * size]
    before = [each.cpu().double() for each in (query, key)]
    ops.rotary_embedding(positions.cuda(), query, key, size, cache.cuda(), True)
    turn = torch.complex(*cache[positions].double().chunk(2, -1))[:, None]
    for found, old in zip((query, key), before, strict=True):
        heads = old.view(tokens, -1, size)
        turned = torch.complex(*heads.chunk(2, -1)) * turn
        check(found, torch.cat([turned.real, turned.imag], -1).view(tokens, -1))
    assert torch.equal(projection[:, 3 * size :].cpu(), normal(tokens, 6 * size)[:, 3 * size :])


def test_reshape_and_cache_flash() -> None:
    key, value = normal(5, 2, 4), normal(5, 2, 4, seed=1)
    caches = torch.zeros(2, 3, 16, 2, 4, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([17, 0, -1, 40])  # the third is padding; the fifth token has none
    one = torch.ones(1, device="cuda")
    ops.reshape_and_cache_flash(
        key.cuda(), value.cuda(), *caches, slots.cuda(), "auto", one, one
    )  # fmt: skip
    for cache, rows in zip(caches.cpu(), (key, value), strict=True):
        expected = torch.zeros(48, 2, 4, dtype=torch.bfloat16)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[token]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_vocab_parallel_embedding() -> None:
    """A rank with tokens 10 to 13, a row of padding, and added tokens 100 to 101."""
    weight = normal(7, 4)
    found = ops.vocab_parallel_embedding(
        torch.tensor([10, 13, 9, 14, 100, 101, 102]).cuda(), weight.cuda(), 10, 14, 1, 100, 102
    )
    zero = torch.zeros(4, dtype=torch.bfloat16)
    rows = [weight[0], weight[3], zero, zero, weight[5], weight[6], zero]
    assert torch.equal(found.cpu(), torch.stack(rows))


def test_top_k_and_top_p() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    logits = torch.tensor([[0.1, 3.0, 2.0, 1.0], [4.0, 0.0, 0.0, 0.0]])
    found = topk_topp_sampler.apply_top_k_top_p(
        logits.cuda(), torch.tensor([2, 4]).cuda(), torch.tensor([1.0, 0.5]).cuda()
    ).cpu()
    assert found.isfinite().tolist() == [[False, True, True, False], [True, False, False, False]]


def test_an_operator_without_a_formula_raises_with_its_name() -> None:
    x = normal(2, 8).cuda()
    with pytest.raises(RuntimeError, match="_C::gelu_and_mul"):
        torch.ops._C.gelu_and_mul(torch.empty(2, 4, dtype=x.dtype, device="cuda"), x)
