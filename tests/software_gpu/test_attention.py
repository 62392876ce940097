"""Attention on the software GPU equals PyTorch's scaled_dot_product_attention on the CPU."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

if os.environ.get("SOFTWARE_GPU_VALUES") != "1":
    pytest.skip("needs the software GPU with values", allow_module_level=True)

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention.varlen import varlen_attn  # noqa: E402

LENGTHS = (5, 1, 9)
HEADS, SIZE = 4, 64
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}  # bfloat16


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def allowed(queries: int, keys: int, causal: bool, left: int) -> Tensor:
    """[queries, keys]: the last query is at the last key."""
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    return seen & (distance <= left) if left >= 0 else seen


def expected_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], lengths: tuple[int, ...],
    causal: bool, left: int = -1,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention of each sequence, in float32."""
    outputs = []
    for q, k, v in zip(query.float().split(lengths), keys, values, strict=True):
        heads = [x.float().transpose(0, 1)[None] for x in (q, k, v)]
        seen = allowed(len(q), len(k), causal, left)
        output = functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(("causal", "left"), [(False, -1), (True, -1), (True, 3)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_packed_attention_and_its_gradient(causal: bool, left: int, key_heads: int) -> None:
    total = sum(LENGTHS)
    inputs = [
        normal(total, heads, SIZE, seed=i) for i, heads in enumerate((HEADS, key_heads, key_heads))
    ]
    grad = normal(total, HEADS, SIZE, seed=3)

    q, k, v = (each.clone().requires_grad_() for each in inputs)
    expected = expected_attention(q, k.split(LENGTHS), v.split(LENGTHS), LENGTHS, causal, left)
    expected.backward(grad.float())

    there = [each.cuda().requires_grad_() for each in inputs]
    starts = starts_of(LENGTHS).cuda()
    found = varlen_attn(
        *there, starts, starts, max(LENGTHS), max(LENGTHS), enable_gqa=key_heads != HEADS,
        window_size=(left, 0 if causal else -1),
    )  # fmt: skip
    found.backward(grad.cuda())

    torch.testing.assert_close(found.cpu().float(), expected, **TOLERANCE)
    for one, other in zip(there, (q, k, v), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, **TOLERANCE)


#: Keys of each sequence in the cache, with those of this step's queries; and those of a block.
KEYS, BLOCK = (4, 37, 20), 16


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("left", [-1, 6])
@pytest.mark.parametrize("queries", [(4, 1, 3), (1, 1, 1)])
def test_attention_with_a_paged_cache(version: int, left: int, queries: tuple[int, ...]) -> None:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    query = normal(sum(queries), HEADS, SIZE, seed=0)
    # Blocks of the cache in no order; those of shorter sequences are followed by any number.
    table = torch.tensor([[7, 0, 0], [2, 5, 1], [4, 6, 0]], dtype=torch.int32)
    caches = [normal(8, BLOCK, 2, SIZE, seed=i) for i in (1, 2)]
    keys, values = (
        [cache[row.long()].flatten(0, 1)[:n] for row, n in zip(table, KEYS, strict=True)]
        for cache in caches
    )
    expected = expected_attention(query, keys, values, queries, causal=True, left=left)

    output = torch.empty_like(query, device="cuda")
    with torch.inference_mode():
        flash_attn_varlen_func(
            q=query.cuda(), k=caches[0].cuda(), v=caches[1].cuda(), out=output,
            cu_seqlens_q=starts_of(queries).cuda(), max_seqlen_q=max(queries),
            seqused_k=torch.tensor(KEYS, dtype=torch.int32).cuda(), max_seqlen_k=max(KEYS),
            softmax_scale=SIZE**-0.5, causal=True, window_size=[left, 0 if left >= 0 else -1],
            block_table=table.cuda(), fa_version=version,
        )  # fmt: skip
    torch.testing.assert_close(output.cpu().float(), expected, **TOLERANCE)


def test_a_query_that_sees_no_key_gives_zero() -> None:
    starts, key_starts = torch.tensor([0, 3]).int().cuda(), torch.tensor([0, 2]).int().cuda()
    query, key = normal(3, 2, SIZE, seed=0).cuda(), normal(2, 2, SIZE, seed=1).cuda()
    found = varlen_attn(query, key, key, starts, key_starts, 3, 2, window_size=(-1, 0))
    assert found[0].abs().sum().item() == 0 and found[1:].isfinite().all()
    torch.testing.assert_close(found[1].cpu(), key[0].cpu(), **TOLERANCE)


def test_dropout_is_refused() -> None:
    query = normal(4, 2, SIZE, seed=0).cuda()
    starts = torch.tensor([0, 4]).int().cuda()
    with pytest.raises(RuntimeError, match="dropout_p"):
        torch.ops.aten._flash_attention_forward(
            query, query, query, starts, starts, 4, 4, 0.5, True, False
        )
