"""Attention of samples packed into one row, with the kernel that PyTorch's own wheel brings.

Upstream packs a micro-batch into one row of tokens whose positions restart at 0. On CUDA the kernel
is ``torch.nn.attention.varlen.varlen_attn`` (FlashAttention 2, arXiv 2307.08691; torch >= 2.11), so
flash-attn need not be compiled; elsewhere each sample has its own ``sdpa`` call. Both get the same
:class:`PackedRow`, which is worked out once per row of tokens, not once per layer: it is
remembered for its ``position_ids`` tensor. Every layer is handed that one tensor, and so is its
recomputation in the backward pass, whatever was run in between.

``attend_packed`` needs torch alone, a whole model transformers as well::

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, attention)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN)
    model(tokens, position_ids=position_ids)  # both [1, T]

The name has no mask function, so transformers builds no mask, and does not look for packed samples
with a host synchronisation of its own.

Shapes: ``T`` tokens of all samples, ``S`` samples, ``H`` query heads, ``K`` key and value heads
(H is a multiple of K), ``D`` head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from sg_rlhf.overlay.cpu import platform

#: The name in transformers' registry, and so a value of ``ds.attn_implementation``.
VARLEN = "varlen"

_UNPACK = "set ds.packing_samples=false"


class PackedRow(NamedTuple):
    """Where the samples of a packed row begin and end.

    Attributes:
        cu_seq_lens: [S + 1] int32 on the row's device: 0, and where each sample ends.
        lengths: tokens of each sample, on the host.
        max_length: the longest of them.
    """

    cu_seq_lens: Any
    lengths: list[int]
    max_length: int


def chosen(asked: str, packing: bool, ring_attn_size: int) -> str:
    """The attention that a run uses, of the one that its flags ask for.

    Upstream replaces whatever is not flash-attn by flash-attn where samples are packed; here
    :data:`VARLEN` takes that place. It knows packed rows alone, so padded ones get ``sdpa``. Ring
    attention is made of flash-attn.
    """
    if ring_attn_size > 1:
        return "flash_attention_2" if asked == VARLEN else asked
    if not packing:
        return "sdpa" if asked == VARLEN else asked
    return asked if "flash_attention" in asked else VARLEN


def packed_row(position_ids: Any) -> PackedRow:
    """The samples of a row, from its positions; on CUDA with one host synchronisation.

    Args:
        position_ids: [1, T]; they count up by one and restart at 0 with each sample.

    Raises:
        ValueError: these are not the positions of packed samples.
    """
    import torch

    if position_ids.ndim != 2 or len(position_ids) != 1:
        raise ValueError(f"position ids {list(position_ids.shape)}: expected [1, T]")
    positions = position_ids[0].cpu()
    starts = (positions == 0).nonzero()[:, 0]
    follows = (positions.diff() == 1) | (positions[1:] == 0)
    if len(starts) == 0 or starts[0] != 0 or not follows.all():
        raise ValueError("position ids do not restart at 0 and count up: expected packed samples")
    ends = torch.cat([starts, torch.tensor([len(positions)])])
    lengths = ends.diff().tolist()
    cu_seq_lens = ends.to(torch.int32)
    if position_ids.is_cuda:
        # From pinned memory the copy is queued, and nobody waits for it.
        cu_seq_lens = cu_seq_lens.pin_memory().to(position_ids.device, non_blocking=True)
    return PackedRow(cu_seq_lens, lengths, max(lengths))


def attend_packed(
    query_THD: Any,
    key_TKD: Any,
    value_TKD: Any,
    row: PackedRow,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Any:
    """Causal attention of each sample to itself, with a gradient.

    Args:
        query_THD: on CUDA bfloat16 or float16, with D a multiple of 8 up to 256.
        key_TKD: as the query.
        value_TKD: as the query.
        row: of :func:`packed_row`.
        scale: of the scores; None for 1 / sqrt(D).
        window: tokens that each one attends to, itself included; None for all before it.

    Returns:
        [T, H, D], in the query's dtype.

    Raises:
        RuntimeError: on CUDA, another dtype, or what the kernel itself refuses.
    """
    if window is not None and window >= row.max_length:
        window = None
    of_device = _attend_on_cuda if query_THD.is_cuda else _attend_one_by_one
    return of_device(query_THD, key_TKD, value_TKD, row, scale, window)


@functools.cache
def _kernel() -> Callable[..., Any]:
    """torch's function. Before 2.13 it takes grouped heads as they come, and has no argument."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def _attend_on_cuda(
    query: Any, key: Any, value: Any, row: PackedRow, scale: float | None, window: int | None
) -> Any:
    import torch

    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"packed attention of {query.dtype}: bfloat16 or float16; {_UNPACK}")
    ends, longest = row.cu_seq_lens, row.max_length
    # To the left as many as the window leaves beside the token itself, -1 for all.
    sizes = (-1 if window is None else window - 1, 0)
    return _kernel()(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=sizes
    )


def _attend_one_by_one(
    query: Any, key: Any, value: Any, row: PackedRow, scale: float | None, window: int | None
) -> Any:
    """Without padding no product is computed for it (bench/packing_on_cpu.py)."""
    import torch

    dtype = query.dtype
    if dtype == torch.bfloat16 and not platform.has_bf16_units():
        # See platform.attend_in_float32.
        query, key, value = query.float(), key.float(), value.float()
    outputs = []
    for q, k, v in zip(*(x.split(row.lengths) for x in (query, key, value)), strict=True):
        mask = None
        if window is not None and len(q) > window:
            mask = q.new_ones(len(q), len(q), dtype=torch.bool).tril().triu(1 - window)
        output = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None and len(q) > 1,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)


@functools.cache
def _rows() -> Any:
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def row_of(position_ids: Any) -> PackedRow:
    """:func:`packed_row`, worked out once in the life of this tensor."""
    rows = _rows()
    if position_ids not in rows:
        rows[position_ids] = packed_row(position_ids)
    found: PackedRow = rows[position_ids]
    return found


def attention(
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Any = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """:func:`attend_packed` as transformers calls an attention function.

    Args:
        layer: the attention layer, for messages.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: None.
        scaling: of the scores.
        dropout: 0.
        position_ids: [1, T], of packed samples.
        sliding_window: as ``window`` there.

    Returns:
        ``([1, T, H, D], None)``.

    Raises:
        RuntimeError: the row is padded, or the model wants of its attention what this has not.
    """
    name = type(layer).__name__
    if position_ids is None or attention_mask is not None or len(query) != 1:
        raise RuntimeError(f"{name} gives no packed row; {_UNPACK}")
    for what in ("softcap", "s_aux"):
        if others.get(what) is not None:
            raise RuntimeError(f"{name} has {what}, which {VARLEN} attention has not; {_UNPACK}")
    if dropout:
        raise RuntimeError(f"{name} has dropout, which {VARLEN} attention has not; {_UNPACK}")
    try:
        row = row_of(position_ids)
    except ValueError as error:
        raise RuntimeError(f"{name} gives no packed row ({error}); {_UNPACK}") from None
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    output = attend_packed(query_THD, key_TKD, value_TKD, row, scale=scaling, window=sliding_window)
    return output[None], None


def with_lengths_known(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' ``flash_attention_2``, told where packed samples begin.

    Otherwise it works that out from the positions in every layer, with three host synchronisations.
    """

    @functools.wraps(original)
    def flash_attention(
        layer: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        positions = kwargs.get("position_ids")
        known = attention_mask is not None or kwargs.get("cu_seq_lens_q") is not None
        if not known and positions is not None and len(positions) == len(query) == 1:
            try:
                row = row_of(positions)
            except ValueError:  # a row that is not packed
                return original(layer, query, key, value, attention_mask, **kwargs)
            kwargs |= {
                "position_ids": None,
                "cu_seq_lens_q": row.cu_seq_lens,
                "cu_seq_lens_k": row.cu_seq_lens,
                "max_length_q": row.max_length,
                "max_length_k": row.max_length,
            }
        return original(layer, query, key, value, attention_mask, **kwargs)

    return flash_attention
