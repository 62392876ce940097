"""Attention of packed samples beside each sample alone: values, gradients, memory, time, waits.

The reference is plain softmax attention in float64, of each sample alone. The kernel may be as far
from it as PyTorch's own ``scaled_dot_product_attention`` of each sample is, and half as much again.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.gpu.measure import GIB, costs, host_waits, relative
from tests.gpu.result import Job, Record

#: Query heads, key and value heads, head size.
HEADS = {"qwen2.5-0.5b": (14, 2, 64), "qwen2.5-3b": (16, 2, 128), "qwen2.5-7b": (28, 4, 128)}
OURS = "sg_rlhf.overlay.model.packed_attention"
Attention = Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]


def alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """One ``scaled_dot_product_attention`` per sample; [T, H, D]."""
    outputs = []
    for sample in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads_first = (x.transpose(0, 1)[None] for x in sample)
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention in float64, written out; [T, H, D]."""
    outputs = []
    group = q.shape[1] // k.shape[1]
    for one_q, one_k, one_v in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        wide_k, wide_v = (x.double().repeat_interleave(group, dim=1) for x in (one_k, one_v))
        scores = torch.einsum("qhd,khd->hqk", one_q.double(), wide_k) / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, wide_v))
    return torch.cat(outputs)


def ours() -> Attention | None:
    """The project's packed attention; None where this version has none."""
    if importlib.util.find_spec(OURS) is None:
        return None
    module = importlib.import_module(OURS)

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        positions = torch.cat([torch.arange(n, device=q.device) for n in lengths])[None]
        out: Tensor = module.packed_attention(q, k, v, module.row_from_positions(positions))
        return out

    return attend


def of_torch(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` itself."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=q.device)
    longest = max(lengths)
    out: Tensor = varlen_attn(
        q, k, v, ends, ends, longest, longest, window_size=(-1, 0),
        **({"enable_gqa": True} if grouped else {}),
    )  # fmt: skip
    return out


def of_flash_attn(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """flash-attn's own kernel."""
    from flash_attn import flash_attn_varlen_func

    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=q.device)
    out: Tensor = flash_attn_varlen_func(
        q, k, v, ends, ends, max(lengths), max(lengths), causal=True
    )
    return out


def candidates(record: Record, job: Job) -> dict[str, Attention]:
    """What is here to be compared."""
    found: dict[str, Attention] = {}
    mine = ours()
    if mine is not None:
        found["ours"] = mine
    else:
        record.skip("packed attention of the project", f"{OURS} is not in this version")
    if job.on_cuda:
        found["torch varlen"] = of_torch
        # Not the stand-in, which has no kernel.
        if importlib.util.find_spec("flash_attn_2_cuda") is not None:
            found["flash-attn"] = of_flash_attn
        else:
            record.skip("flash-attn's kernel", "flash-attn is not installed (nothing needs it)")
    return found


def inputs(tokens: int, heads: tuple[int, int, int], job: Job) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values in bfloat16, with a gradient."""
    generator = torch.Generator(job.device).manual_seed(tokens)
    query_heads, kv_heads, size = heads
    q, k, v = (
        torch.randn(
            tokens, count, size, generator=generator, device=job.device, dtype=torch.bfloat16
        ).requires_grad_()
        for count in (query_heads, kv_heads, kv_heads)
    )
    return q, k, v


def with_gradients(attention: Attention, qkv: tuple[Tensor, ...], lengths: list[int]) -> list[Any]:
    """[output, and the gradients of queries, keys and values]."""
    query, key, value = qkv
    out = attention(query, key, value, lengths)
    generator = torch.Generator(out.device).manual_seed(1)
    slope = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
    # The same numbers for every dtype.
    slope = slope.to(torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, slope)]


def values(record: Record, job: Job, found: dict[str, Attention]) -> None:
    """Output and gradients beside float64, at the heads of three models."""
    lengths = [33, 1, 17] if job.small else [700, 1, 333, 17, 1024]
    parts = ("output", "dq", "dk", "dv")
    for model, heads in HEADS.items():
        qkv = inputs(sum(lengths), heads, job)
        expected = with_gradients(exact, qkv, lengths)
        one_by_one = with_gradients(alone, qkv, lengths)
        for name, attention in found.items():
            for part, got, own, true in zip(
                parts, with_gradients(attention, qkv, lengths), one_by_one, expected, strict=True
            ):
                limit = 1.5 * relative(own, true) + 2e-3
                record.within(f"{model}: {name}, {part}", relative(got, true), limit)
        # A sample must not see its neighbours.
        changed = [x.detach().clone() for x in qkv]
        for x in changed:
            x[lengths[0] :] = torch.randn_like(x[lengths[0] :])
        for name, attention in found.items():
            with torch.no_grad():
                first = attention(*qkv, lengths)[: lengths[0]]
                same = torch.equal(first, attention(*changed, lengths)[: lengths[0]])
            record.check(f"{model}: {name}, the first sample does not see the others", same)


def speed(record: Record, job: Job, found: dict[str, Attention]) -> None:
    """Forward and backward at the lengths of a micro-batch."""
    lengths = [64, 32, 16] if job.small else [5120, 5120, 4096, 3000, 2000, 600, 64]
    for model, heads in HEADS.items():
        qkv = inputs(sum(lengths), heads, job)
        calls = {
            name: functools.partial(with_gradients, attention, qkv, lengths)
            for name, attention in {**found, "sdpa one by one": alone}.items()
        }
        for name, cost in costs(calls, job.device, repeats=2 if job.small else 10).items():
            record.figure(
                f"attention_{model}_T{sum(lengths)}_{name}",
                {"ms": cost.milliseconds, "peak_gib": (cost.peak_bytes or 0) / GIB},
            )


def whole_model(record: Record, job: Job) -> None:
    """A Qwen2 of two layers: packed beside one by one, and how often the host waits."""
    if importlib.util.find_spec("transformers") is None or ours() is None:
        record.skip("a packed Qwen2", f"needs transformers and {OURS}")
        return
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    packed = importlib.import_module(OURS)
    ALL_ATTENTION_FUNCTIONS.register(packed.VARLEN, packed.attention)
    dtype = torch.bfloat16 if job.on_cuda else torch.float32

    def qwen2(layers: int) -> Any:
        config = transformers.Qwen2Config(
            vocab_size=1000, num_hidden_layers=layers, num_key_value_heads=2,
            hidden_size=64 if job.small else 896, num_attention_heads=2 if job.small else 14,
            intermediate_size=128 if job.small else 4864, max_position_embeddings=8192,
            tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        return transformers.Qwen2ForCausalLM(config).to(device=job.device, dtype=dtype)

    model = qwen2(2)
    lengths = [19, 1, 40] if job.small else [900, 1, 333, 64, 1500]
    tokens = torch.randint(0, 1000, (1, sum(lengths)), device=job.device)
    positions = torch.cat([torch.arange(n, device=job.device) for n in lengths])[None]

    def logits(packing: bool) -> Tensor:
        model.set_attn_implementation(packed.VARLEN if packing else "sdpa")
        if packing:
            out: Tensor = model(tokens, position_ids=positions, use_cache=False).logits
            return out
        rows = [model(part, use_cache=False).logits for part in tokens.split(lengths, dim=1)]
        return torch.cat(rows, dim=1)

    def gradients(packing: bool) -> tuple[Tensor, Tensor]:
        model.zero_grad(set_to_none=True)
        out = logits(packing)
        out.float().log_softmax(-1).gather(-1, tokens[..., None]).sum().backward()
        slopes = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return out.detach(), torch.cat(slopes)

    found, expected = gradients(True), gradients(False)
    for part, got, true in zip(("logits", "gradient"), found, expected, strict=True):
        # A gradient sums over tokens, in bfloat16 in another order.
        limit = {"logits": 0.02, "gradient": 0.05}[part] if dtype == torch.bfloat16 else 1e-5
        record.within(f"a packed Qwen2 beside one by one: {part}", relative(got, true), limit)
    once_a_row(record, job, packed, qwen2, tokens, positions)


def once_a_row(
    record: Record, job: Job, packed: Any, qwen2: Callable[[int], Any],
    tokens: Tensor, positions: Tensor,
) -> None:  # fmt: skip
    """How often the bounds of a row are worked out in a forward and backward pass, and how often
    the host waits for the GPU in it: as often in a deep model as in a shallow one."""
    found = {}
    for recomputed, layers in itertools.product((False, True), (2, 4)):
        model = qwen2(layers)
        model.set_attn_implementation(packed.VARLEN)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        # The first pass may have something to load.
        for _ in range(2):
            found[layers] = _calls_and_waits(job, packed, model, tokens, positions.clone())
        name = f"a packed row of {layers} layers{', recomputed' if recomputed else ''}"
        calls, waits = found[layers]
        shallow = found[2][1]
        record.check(f"{name}: bounds worked out once", calls == 1, calls, 1)
        if job.on_cuda:
            record.goal(f"{name}: waits of the host", waits, 2)
            if layers == 4:
                record.check(f"{name}: no wait in a layer", waits == shallow, waits, shallow)
    if not job.on_cuda:
        record.skip("waits of the host in a packed forward and backward", "asks CUDA")


def _calls_and_waits(
    job: Job, packed: Any, model: Any, tokens: Tensor, positions: Tensor
) -> tuple[int, int]:
    """Of one forward and backward pass; positions that the attention has not seen, as each
    micro-batch has its own."""
    original, calls = packed.row_from_positions, []

    def counted(position_ids: Tensor) -> Any:
        calls.append(position_ids)
        return original(position_ids)

    def passes() -> None:
        out = model(tokens, position_ids=positions, use_cache=False).logits
        out.float().sum().backward()

    packed.row_from_positions = counted
    try:
        if job.on_cuda:
            waits = host_waits(passes)
        else:
            passes()
            waits = 0
    finally:
        packed.row_from_positions = original
    return len(calls), waits


def run(record: Record, job: Job) -> None:
    """All of it, with what is installed."""
    found = candidates(record, job)
    if found:
        values(record, job, found)
    whole_model(record, job)
    if found:
        speed(record, job, found)
