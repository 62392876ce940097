"""Attention over packed sequences on the CPU: forward, backward and with a paged KV cache.

It stands for the FlashAttention kernels of PyTorch and vLLM. Tensors are packed: [tokens, heads,
head size], and ``starts`` [sequences + 1] holds where each sequence begins. Heads of keys and
values may be fewer than those of queries (grouped-query attention).

Formula: Dao, FlashAttention-2 (2023), section 3.1, without its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from software_memory import NoValuesError
from torch import Tensor


def refuse(arguments: Mapping[str, Any], ignored: frozenset[str]) -> None:
    """Raise if an argument that would change the result is given."""
    for name, value in arguments.items():
        given = value is not None if isinstance(value, Tensor | None) else bool(value)
        if given and name not in ignored:
            raise NoValuesError(f"software GPU: {name} has no effect on the values: do not use")


class Mask(NamedTuple):
    """Which keys a query sees. left and right: keys before and after its own, -1 for all."""

    causal: bool
    left: int = -1
    right: int = -1

    def hidden(self, queries: int, keys: int) -> Tensor:
        """[queries, keys] of bool. The last query's own key is the last key."""
        own = torch.arange(queries, device="cpu")[:, None] + (keys - queries)
        key = torch.arange(keys, device="cpu")[None]
        hidden = torch.zeros(queries, keys, dtype=torch.bool, device="cpu")
        right = 0 if self.causal else self.right
        if right >= 0:
            hidden |= key > own + right
        if self.left >= 0:
            hidden |= key < own - self.left
        return hidden


class Span(NamedTuple):
    """One sequence: where its queries and keys are, and its keys and values."""

    queries: slice
    keys: slice
    key: Tensor
    value: Tensor


def packed(query_starts: Tensor, key_starts: Tensor, key: Tensor, value: Tensor) -> Iterator[Span]:
    """Sequences whose keys and values are packed as the queries are."""
    query_ends, key_ends = query_starts.tolist(), key_starts.tolist()
    for i in range(len(query_ends) - 1):
        keys = slice(key_ends[i], key_ends[i + 1])
        yield Span(slice(query_ends[i], query_ends[i + 1]), keys, key[keys], value[keys])


def paged(
    query_starts: Tensor, lengths: Tensor, table: Tensor, key: Tensor, value: Tensor
) -> Iterator[Span]:
    """Sequences whose keys and values are in blocks of a cache.

    Args:
        lengths: keys of each sequence, [sequences].
        table: the blocks of each sequence, [sequences, blocks].
        key, value: [blocks, block size, heads, head size].
    """
    query_ends, used, block = query_starts.tolist(), lengths.tolist(), key.shape[1]
    for i in range(len(query_ends) - 1):
        blocks = table[i, : -(-used[i] // block)].long()
        rows = [cache[blocks].flatten(0, 1)[: used[i]] for cache in (key, value)]
        yield Span(slice(query_ends[i], query_ends[i + 1]), slice(0, used[i]), *rows)


def spread(rows: Tensor, heads: int) -> Tensor:
    """Keys or values in float32, repeated for each query head of their group."""
    return rows.float().repeat_interleave(heads // rows.shape[1], dim=1)


def gathered(grad: Tensor, heads: int) -> Tensor:
    """The gradient of :func:`spread`: the sum over the query heads of each group."""
    rows, query_heads, size = grad.shape
    return grad.reshape(rows, heads, query_heads // heads, size).sum(2)


def scores(query: Tensor, key: Tensor, mask: Mask, scale: float) -> Tensor:
    """[heads, queries, keys]; -inf where a query does not see a key."""
    product = torch.einsum("qhd,khd->hqk", query, key) * scale
    return product.masked_fill(mask.hidden(*product.shape[1:]), -math.inf)


def probabilities(logits: Tensor, log_sum: Tensor) -> Tensor:
    """exp(logits - log_sum); 0 for a query that sees no key."""
    return (logits - log_sum.masked_fill(log_sum.isinf(), math.inf)[..., None]).exp()


def forward(
    query: Tensor, sequences: Iterator[Span], mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """(output like query, log of the sum of exp(scores) [heads, tokens], float32)."""
    tokens, heads, _ = query.shape
    output = torch.zeros_like(query)
    log_sums = torch.zeros(heads, tokens, dtype=torch.float32, device="cpu")
    for span in sequences:
        rows = span.queries
        key, value = spread(span.key, heads), spread(span.value, heads)
        logits = scores(query[rows].float(), key, mask, scale)
        log_sum = logits.logsumexp(-1)
        weights = probabilities(logits, log_sum)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
        log_sums[:, rows] = log_sum
    return output, log_sums


def backward(
    grad: Tensor, query: Tensor, log_sums: Tensor,
    sequences: Iterator[Span], mask: Mask, scale: float, like: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, from the forward pass's log sums."""
    heads = query.shape[1]
    grads = [torch.zeros(each.shape, device="cpu") for each in (query, *like)]
    for span in sequences:
        rows = span.queries
        q, g = query[rows].float(), grad[rows].float()
        key, value = spread(span.key, heads), spread(span.value, heads)
        weights = probabilities(scores(q, key, mask, scale), log_sums[:, rows].float())
        d_weights = torch.einsum("qhd,khd->hqk", g, value)
        # The gradient through softmax: p (dp - sum of p dp).
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * scale
        d_key = torch.einsum("hqk,qhd->khd", d_scores, q)
        d_value = torch.einsum("hqk,qhd->khd", weights, g)
        grads[0][rows] = torch.einsum("hqk,khd->qhd", d_scores, key)
        grads[1][span.keys] += gathered(d_key, like[0].shape[1])
        grads[2][span.keys] += gathered(d_value, like[1].shape[1])
    d_query, d_key, d_value = (
        each.to(of.dtype) for each, of in zip(grads, (query, *like), strict=True)
    )
    return d_query, d_key, d_value


def scale_of(scale: float | None, query: Tensor) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def window(left: int | None, right: int | None, causal: bool) -> Mask:
    return Mask(causal, -1 if left is None else left, -1 if right is None else right)


#: They choose how a kernel works, not what it computes.
SIZES = frozenset({"max_q", "max_k", "num_splits", "rng_state", "unused", "out"})


def aten_forward(
    *, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor | None,
    is_causal: bool, scale: float | None, window_size_left: int | None,
    window_size_right: int | None, seqused_k: Tensor | None, block_table: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor, None, None, None]:  # fmt: skip
    """aten::_flash_attention_forward, which torch.nn.attention.varlen calls."""
    refuse(others, SIZES)
    if block_table is not None and seqused_k is not None:
        spans = paged(cum_seq_q, seqused_k, block_table, key, value)
    elif cum_seq_k is not None and seqused_k is None:
        spans = packed(cum_seq_q, cum_seq_k, key, value)
    else:
        raise NoValuesError("software GPU: attention needs packed or paged sequences")
    mask = window(window_size_left, window_size_right, is_causal)
    return *forward(query, spans, mask, scale_of(scale, query)), None, None, None


def aten_backward(
    *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor,
    logsumexp: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, is_causal: bool,
    scale: float | None, window_size_left: int | None, window_size_right: int | None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """aten::_flash_attention_backward."""
    refuse(others, SIZES)
    spans = packed(cum_seq_q, cum_seq_k, key, value)
    mask = window(window_size_left, window_size_right, is_causal)
    return backward(grad_out, query, logsumexp, spans, mask, scale_of(scale, query), (key, value))


#: As SIZES. Descales are for float8 caches, which are refused.
FLASH_3_SIZES = frozenset({
    "max_seqlen_q", "max_seqlen_k", "q_descale", "k_descale", "v_descale",
    "is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin",
})  # fmt: skip


def flash_3(
    *, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, page_table: Tensor | None,
    softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int,
    cp_world_size: int, **others: Any,
) -> list[Tensor | None]:  # fmt: skip
    """_vllm_fa3_C::fwd. ``out``, where given, is what the operator returns."""
    refuse(others, FLASH_3_SIZES)
    if cp_world_size > 1 or k.element_size() == 1:
        raise NoValuesError("software GPU: no context parallelism and no float8 cache")
    mask = window(window_size_left, window_size_right, is_causal)
    result, log_sums = forward(
        q, vllm_spans(cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, k, v), mask, softmax_scale
    )
    return [result, log_sums, None, None]


def flash_2(
    *, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, seqused_k: Tensor | None, block_table: Tensor | None,
    softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int,
    **others: Any,
) -> list[Tensor]:  # fmt: skip
    """_vllm_fa2_C::varlen_fwd. With a cache, ``cu_seqlens_k`` is not read."""
    refuse(others, frozenset({"max_seqlen_q", "max_seqlen_k", "num_splits"}))
    mask = window(window_size_left, window_size_right, is_causal)
    spans = vllm_spans(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, k, v)
    return list(forward(q, spans, mask, softmax_scale))


def vllm_spans(
    query_starts: Tensor, key_starts: Tensor | None, lengths: Tensor | None,
    table: Tensor | None, key: Tensor, value: Tensor,
) -> Iterator[Span]:  # fmt: skip
    if table is not None and lengths is not None:
        return paged(query_starts, lengths, table, key, value)
    if key_starts is None or lengths is not None:
        raise NoValuesError("software GPU: attention needs packed or paged sequences")
    return packed(query_starts, key_starts, key, value)


FORMULAS: dict[str, Callable[..., Any]] = {
    "aten::_flash_attention_forward": aten_forward,
    "aten::_flash_attention_backward": aten_backward,
    "_vllm_fa2_C::varlen_fwd": flash_2,
    "_vllm_fa3_C::fwd": flash_3,
}
