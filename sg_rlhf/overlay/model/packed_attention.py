"""Attention within samples packed into one row, with the kernel in PyTorch's own wheel.

Upstream packs a micro-batch into one row of tokens whose positions restart at 0. On CUDA the kernel
is ``torch.nn.attention.varlen.varlen_attn`` (FlashAttention 2, arXiv 2307.08691; torch >= 2.11), so
flash-attn need not be compiled. On the CPU each sample has its own ``sdpa`` call. Both take a
:class:`PackedRow`, which is computed once per row of tokens and not once per layer: it is cached
for its ``position_ids`` tensor. Every layer gets that one tensor, also in the recomputation of the
backward pass.

:func:`packed_attention` needs only torch; a whole model also needs transformers::

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, attention)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN)
    model(tokens, position_ids=position_ids)  # both [1, T]

The name has no mask function, so transformers builds no mask and does not look for packed samples
with a host synchronisation.

Shapes: ``T`` tokens of all samples, ``S`` samples, ``H`` query heads, ``K`` key and value heads
(H is a multiple of K), ``D`` head size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.settings.worker_settings import VARLEN as VARLEN

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.weak import WeakTensorKeyDictionary

_UNPACK = "set ds.packing_samples=false"


class Keys(NamedTuple):
    """The keys of a row whose samples attend to more than their own tokens.

    Attributes:
        prefix_of: per sample, the index of the sample that is its prefix; -1 for none.
        gather_index: [T'], index in the row of each key, sample by sample, on the row's device.
        cu_seq_lens: [S + 1] int32, cumulative numbers of keys, on the row's device.
        masks: per sample, bool [its tokens, its keys], True where it attends; None without a
            prefix. Empty on CUDA, whose kernel has no mask.
    """

    prefix_of: list[int]
    gather_index: Tensor
    cu_seq_lens: Tensor
    max_length: int
    masks: list[Tensor | None]


class PackedRow(NamedTuple):
    """Where the samples of a row begin: ``cu_seq_lens`` [S + 1] int32, cumulative tokens.

    ``keys`` is None if each sample attends only to itself.
    """

    cu_seq_lens: Tensor
    lengths: list[int]
    max_length: int
    keys: Keys | None = None


def resolve_attention(requested: str, packing: bool) -> str:
    """The attention of a run; :data:`VARLEN` supports only packed rows, so others get ``sdpa``."""
    if not packing:
        return "sdpa" if requested == VARLEN else requested
    return requested if "flash_attention" in requested else VARLEN


def row_from_positions(position_ids: Tensor) -> PackedRow:
    """The packed row of position ids [1, T]; on CUDA with one host synchronisation.

    Raises ValueError unless they count up by one and restart at 0 with each sample.
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
    return PackedRow(_on(ends.to(torch.int32), position_ids.device), lengths, max(lengths))


def row_with_prefixes(
    lengths: list[int], prefix_of: list[int], device: torch.device | str
) -> PackedRow:
    """A row in which samples attend to a prefix sample as to their own earlier tokens."""
    import torch

    ends = torch.tensor([0, *lengths]).cumsum(0)
    indices = [torch.arange(int(start), int(end)) for start, end in itertools.pairwise(ends)]
    keys = [
        index if prefix < 0 else torch.cat([indices[prefix], index])
        for index, prefix in zip(indices, prefix_of, strict=True)
    ]
    key_lengths = [len(index) for index in keys]
    on_host = torch.device(device).type == "cpu"
    masks = [
        torch.ones(q, k, dtype=torch.bool).tril(k - q) if q < k else None
        for q, k in zip(lengths, key_lengths, strict=True)
    ]
    return PackedRow(
        _on(ends.to(torch.int32), device),
        lengths,
        max(lengths),
        Keys(
            prefix_of,
            _on(torch.cat(keys), device),
            _on(torch.tensor([0, *key_lengths]).cumsum(0).to(torch.int32), device),
            max(key_lengths),
            masks if on_host else [],
        ),
    )


def _on(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device, from pinned memory and without waiting."""
    import torch

    if torch.device(device).type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def packed_attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    row: PackedRow,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each sample and to its prefix; differentiable.

    Args:
        query_THD: on CUDA bfloat16 or float16, with D a multiple of 8 up to 256; the others alike.
        scale: factor of the scores; None for 1 / sqrt(D).
        window: number of tokens that a token attends to, with itself; None for all earlier ones.

    Returns:
        [T, H, D], in the query's dtype.

    Raises:
        RuntimeError: on CUDA another dtype, or shapes that the kernel refuses.
    """
    if window is not None and window >= (row.keys or row).max_length:
        window = None
    attend = _attend_on_cuda if query_THD.is_cuda else _per_sample_sdpa
    return attend(query_THD, key_TKD, value_TKD, row, scale, window)


@functools.cache
def _kernel() -> Callable[..., Any]:
    """torch's function. Before 2.13 it supports grouped heads without an argument."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def _attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    scale: float | None,
    window: int | None,
) -> Tensor:
    import torch

    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"packed attention of {query.dtype}: bfloat16 or float16; {_UNPACK}")
    ends, longest = row.cu_seq_lens, row.max_length
    key_ends, longest_keys = ends, longest
    if row.keys is not None:
        # The kernel's causal mask is aligned so that the last query sees the last key.
        key_ends, longest_keys = row.keys.cu_seq_lens, row.keys.max_length
        key, value = key[row.keys.gather_index], value[row.keys.gather_index]
    # (left, right): the window without the token itself, or -1 for all; nothing to the right.
    sizes = (-1 if window is None else window - 1, 0)
    output: Tensor = _kernel()(
        query, key, value, ends, key_ends, longest, longest_keys, scale=scale, window_size=sizes
    )
    return output


def _per_sample_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """One sdpa call per sample: no product is spent on padding."""
    import torch

    dtype = query.dtype
    if dtype == torch.bfloat16 and not platform.has_bf16_units():
        # See platform.attend_in_float32.
        query, key, value = query.float(), key.float(), value.float()
    outputs = []
    queries, keys, values = (torch.split(x, row.lengths) for x in (query, key, value))
    for i, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        mask = None
        if row.keys is not None and (prefix := row.keys.prefix_of[i]) >= 0:
            k, v = torch.cat([keys[prefix], k]), torch.cat([values[prefix], v])
            mask = row.keys.masks[i]
        if window is not None and len(k) > window:
            mask = q.new_ones(len(q), len(k), dtype=torch.bool)
            mask = mask.tril(len(k) - len(q)).triu(len(k) - len(q) + 1 - window)
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
def _rows() -> WeakTensorKeyDictionary:
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def cache_row(position_ids: Tensor, row: PackedRow) -> None:
    """Make :func:`cached_row` return this row for positions [1, T], held weakly.

    For rows with prefixes, whose samples cannot be found from the positions alone.
    """
    _rows()[position_ids] = row


def cached_row(position_ids: Tensor) -> PackedRow:
    """:func:`row_from_positions`, computed once in the life of this tensor."""
    rows = _rows()
    if position_ids not in rows:
        rows[position_ids] = row_from_positions(position_ids)
    row: PackedRow = rows[position_ids]
    return row


def attention(
    layer: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """:func:`packed_attention` with the signature of transformers' attention functions.

    Query [1, H, T, D], key and value [1, K, T, D], ``position_ids`` [1, T] of packed samples;
    returns ``([1, T, H, D], None)``. Raises RuntimeError for a padded row or a feature of the model
    that this attention lacks; other arguments are ignored.
    """
    name = type(layer).__name__
    if position_ids is None or attention_mask is not None or len(query) != 1:
        raise RuntimeError(f"{name} gives no packed row; {_UNPACK}")
    for what in ("softcap", "s_aux"):
        if others.get(what) is not None:
            raise RuntimeError(
                f"{name} has {what}, which {VARLEN} attention does not support; {_UNPACK}"
            )
    if dropout:
        raise RuntimeError(
            f"{name} has dropout, which {VARLEN} attention does not support; {_UNPACK}"
        )
    try:
        row = cached_row(position_ids)
    except ValueError as error:
        raise RuntimeError(f"{name} gives no packed row ({error}); {_UNPACK}") from None
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    output = packed_attention(
        query_THD, key_TKD, value_TKD, row, scale=scaling, window=sliding_window
    )
    return output[None], None


def with_cu_seqlens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' ``flash_attention_2``: pass it the cumulative lengths.

    Otherwise it computes them in every layer, with three host synchronisations.
    """

    @functools.wraps(original)
    def flash_attention(
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        positions = kwargs.get("position_ids")
        known = attention_mask is not None or kwargs.get("cu_seq_lens_q") is not None
        if not known and positions is not None and len(positions) == len(query) == 1:
            try:
                row = cached_row(positions)
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
