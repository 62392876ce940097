"""The CUDA operators of vLLM that a dense Qwen2 or Llama model calls, on the CPU.

vLLM has no CPU kernels for them under these names. Arguments have the names of vLLM's schemas;
operators write into their first arguments and return nothing. An operator without a formula here
raises with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from software_memory import NoValuesError
from torch import Tensor


def normalized(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) in float32, rounded, times the weight."""
    full = rows.float()
    full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + epsilon)
    rounded = full.to(rows.dtype)
    return rounded if weight is None else rounded * weight


def rms_norm(*, result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    result.copy_(normalized(input, weight, epsilon).view(result.shape))


def fused_add_rms_norm(
    *, input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float
) -> None:
    """residual becomes their sum, input its norm."""
    residual.copy_((input.float() + residual.float()).to(residual.dtype))
    input.copy_(normalized(residual, weight, epsilon))


def silu_and_mul(*, result: Tensor, input: Tensor) -> None:
    """silu(first half) * second half."""
    gate, up = input.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate.float()).to(input.dtype) * up)


def rotary_embedding(
    *, positions: Tensor, query: Tensor, key: Tensor | None, head_size: int,
    cos_sin_cache: Tensor, is_neox: bool, rope_dim_offset: int, inverse: bool,
) -> None:  # fmt: skip
    """Rotate the halves of each head by its position's angles, in place."""
    if not is_neox or rope_dim_offset or inverse:
        raise NoValuesError("software GPU: only rotary embeddings of halves of heads")
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    size = cos_sin_cache.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)[..., :size]
        first, second = heads.float().chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        heads.copy_(turned)


def reshape_and_cache_flash(
    *, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Write each token's key and value to its slot. A slot of -1 is padding."""
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise NoValuesError(f"software GPU: no KV cache of {kv_cache_dtype}")
    # Keys may be padded: the slots say how many tokens there are.
    tokens = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[tokens]
    block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache[block, offset] = rows[tokens].to(cache.dtype)


def vocab_parallel_embedding(
    *, out: Tensor, input_ids: Tensor, weight: Tensor, org_vocab_start_index: int,
    org_vocab_end_index: int, num_org_vocab_padding: int, added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> None:  # fmt: skip
    """Rows of this rank's part of the embedding; 0 for tokens of other ranks."""
    ids = input_ids.long()
    original = (ids >= org_vocab_start_index) & (ids < org_vocab_end_index)
    added = (ids >= added_vocab_start_index) & (ids < added_vocab_end_index)
    originals = org_vocab_end_index - org_vocab_start_index
    row = torch.where(original, ids - org_vocab_start_index, 0)
    after = ids - added_vocab_start_index + originals + num_org_vocab_padding
    row = torch.where(added, after, row)
    out.copy_(weight[row].masked_fill(~(original | added)[..., None], 0).view(out.shape))


FORMULAS: dict[str, Callable[..., Any]] = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C::rotary_embedding": rotary_embedding,
    "_C::vocab_parallel_embedding": vocab_parallel_embedding,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
}
