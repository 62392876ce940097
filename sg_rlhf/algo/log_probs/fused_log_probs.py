"""Log-probs of given tokens from hidden states, without materialised logits.

With ``z = (h W^T + b) / T`` the logits of a position over V tokens, or for models that cap them
``z = c tanh((h W^T + b) / c) / T``:

    log p(target) = z_target - lse(z),        lse(z) = log sum_j exp(z_j)
    H             = lse(z) - sum_j p_j z_j,   p = softmax(z)

and their gradients, computed block by block from z, which is recomputed instead of stored:

    d log p / d z_j = [j = target] - p_j
    d H     / d z_j = -p_j (log p_j + H)

A block is some rows times a part of the vocabulary. Over the blocks of a row a running softmax is
kept (:mod:`sg_rlhf.algo.log_probs.online_softmax`).

Matrix products of 2 N H V operations each; with materialised logits it is 1 forward, 2 backward:

    no gradient                          1
    hidden and weight                    1 forward; 3 backward, one of which recomputes z
    hidden alone (a frozen head)         2 forward, 0 backward: see :class:`_UnitGradient`;
                                         not with capped logits
    few logits (:data:`_KEPT`)           1 forward, 2 backward: the logits are kept

Shape suffixes: ``N`` positions, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sg_rlhf.algo.log_probs import online_softmax
from sg_rlhf.algo.log_probs.online_softmax import (
    TORCH_KERNEL,
    BlockKernel,
    RunningSoftmax,
    accumulation_dtype,
    slices,
    target_columns,
)

#: Largest number of rows of a block.
_ROWS = {"cpu": 1024, "cuda": 4096}
#: Columns of a block on the CPU: products are fastest while a block and its factors fit the cache.
_CPU_COLUMNS = 1024
#: Largest number of head elements in a 16-bit block on the CPU, which are converted to float32.
_CPU_HEAD = 2**21
#: Logits of a block on a GPU, and its columns at most. Below them launching the kernels takes
#: longer than computing; above them little is gained (lab/bench/results/head_blocks.json).
_CUDA_LOGITS, _CUDA_COLUMNS = 2**24, 2**15
#: Largest number of logits that are kept for the backward pass; 32 MiB in float32.
_KEPT = 2**23


def selected_log_probs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    chunk: int | None = None,
    kernel: BlockKernel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of target tokens under a language model's head, without its logits.

    Products are accumulated in float32 whatever the dtype. Equal to the log-probs of materialised
    logits up to the order of sums. Additional memory: three blocks of logits, the gradients, and
    for 16-bit dtypes their float32 accumulators, [N, H] and [chunk, H]; the logits themselves where
    they are few (:data:`_KEPT`).

    Args:
        hidden_NH: [N, H], the last hidden states; float64, float32, bfloat16 or float16.
        weight_VH: [V, H], the head's weight in the same dtype; may be tied to the embedding.
        targets_N: [N], token ids, 0 <= target < V.
        bias: [V], the head's bias, or None.
        temperature: T > 0, divides the logits. A model's own factor s of its logits is T / s here.
        softcap: c > 0 of Gemma's ``c tanh(z / c)``, applied before the temperature; None for none.
        with_entropy: also compute the entropy, with gradient.
        chunk: columns of a block; None for the default.
        kernel: element-wise operations on a block between its matrix products; None for Triton's on
            CUDA and PyTorch's elsewhere. Triton needs a C compiler. Without one the default is
            PyTorch's, with a warning.

    Returns:
        ``(log_probs_N, entropy_N)`` in float32 (float64 for float64), in nats, differentiable in
        hidden, weight and bias. The entropy is None without ``with_entropy``. A log-prob is never
        above 0. A position with a NaN logit has NaN; other positions are not affected.

    Raises:
        ValueError: shapes, dtypes or values that do not fit together.
    """
    _check(hidden_NH, weight_VH, targets_N, bias, temperature, softcap, chunk)
    how = _How(
        float(temperature),
        softcap,
        with_entropy,
        chunk,
        kernel or _default_kernel(hidden_NH.device.type),
        torch.is_grad_enabled(),
    )
    log_probs_N, entropy_N = _SelectedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, targets_N, how
    )
    return log_probs_N, entropy_N if with_entropy else None


@functools.cache
def _default_kernel(device: str) -> BlockKernel:
    if device == "cuda" and importlib.util.find_spec("triton"):
        # Only here: torch for the CPU comes without Triton.
        from sg_rlhf.algo.log_probs import triton_softmax

        try:
            triton_softmax.check(device)
        except Exception as error:  # whatever Triton, the C compiler or the driver raise
            warnings.warn(
                f"Triton does not compile here ({error}): log-probs take two to three times as "
                "long; install a C compiler (gcc) and Python's headers",
                stacklevel=2,
            )
        else:
            return triton_softmax.KERNEL
    return TORCH_KERNEL


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    chunk: int | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [N, H], [V, H]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {list(targets.shape)}: expected [{hidden.shape[0]}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)}: expected [{weight.shape[0]}]")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: expected the same")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number above 0")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: expected a number above 0, or None")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: expected a positive number of tokens")


def _factor(tensor: Tensor) -> Tensor:
    """A factor of :func:`_add_product`: the CPU cannot sum 16-bit products in float32."""
    return tensor if tensor.is_cuda else tensor.to(accumulation_dtype(tensor.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add left @ right to ``total``, or overwrite it if ``first``; sums in float32 or float64."""
    beta = 0 if first else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    else:
        torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)


def _columns(device: str, rows: int, weight: Tensor) -> int:
    """Columns of a block for the head's weight [V, H]."""
    # Multiples of 128 suit the products; 512 are enough for them to be efficient.
    if device == "cuda":
        return min(_CUDA_COLUMNS, _CUDA_LOGITS // max(rows, 1) // 128 * 128)
    columns = _CPU_COLUMNS
    if rows < 512:
        # With few rows per block the overhead per block matters: take fewer blocks.
        columns = max(columns, 2**19 // max(rows, 64))
    if weight.dtype.itemsize == 2:
        columns = min(columns, max(512, _CPU_HEAD // weight.shape[1] // 128 * 128))
    return columns


def _blocks(hidden: Tensor, weight: Tensor, chunk: int | None) -> tuple[list[slice], list[slice]]:
    """Slices of rows and of the vocabulary; at least one of each."""
    device = "cuda" if hidden.is_cuda else "cpu"
    rows = len(hidden)
    parts = max(1, -(-rows // _ROWS[device]))
    of_part = -(-rows // parts)
    return (
        slices(rows, of_part) if rows else [slice(0, 0)],
        slices(len(weight), chunk or _columns(device, of_part, weight)),
    )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Logits of a block before the division by the temperature, in float32 or float64."""
    dtype = accumulation_dtype(hidden.dtype)
    if hidden.dtype == dtype:
        logits = torch.mm(hidden, weight.t())
    else:
        logits = torch.mm(hidden, weight.t(), out_dtype=dtype)
    if bias is not None:
        logits += bias
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


@dataclass(frozen=True)
class _How:
    """The arguments that are no tensors, and whether gradients are recorded."""

    temperature: float
    softcap: float | None
    with_entropy: bool
    chunk: int | None
    kernel: BlockKernel
    grad_enabled: bool


class _UnitGradient:
    """d log p / d hidden of some rows, computed in the forward pass, for a frozen head.

    ((1 - p_t) w_t - sum_{j != t} p_j w_j) / T, with w_j a row of the head and t the target. It is a
    second product with the block that is in memory anyway, rescaled whenever the largest logit
    grows. The target is not part of the sum: near p_t = 1, 1 - p_t would be lost in rounding.
    """

    def __init__(self, rows: Tensor) -> None:
        self.sum_NH = rows.new_zeros(rows.shape, dtype=accumulation_dtype(rows.dtype))

    def add(self, exponentials: Tensor, scale_N: Tensor, index_N: Tensor, head: Tensor) -> None:
        """Add a block.

        Args:
            exponentials: [N, C], exp(z - max); overwritten.
            scale_N: factor of the sum so far, exp(max before - max).
            index_N: the target's column relative to the block.
            head: [C, H], the block's rows of the head.
        """
        inside, index_N1 = target_columns(index_N, exponentials.shape[1])
        without = exponentials.gather(1, index_N1).masked_fill_(inside[:, None], 0.0)
        exponentials.scatter_(1, index_N1, without)
        self.sum_NH *= scale_N[:, None]
        _add_product(self.sum_NH, exponentials.to(head.dtype), head, first=False)

    def finish(self, softmax: RunningSoftmax, weight: Tensor, targets: Tensor, t: float) -> Tensor:
        """The gradient [N, H] in the head's dtype, after the last block."""
        inside, index_N1 = target_columns(targets, len(weight))
        result = torch.empty_like(self.sum_NH, dtype=weight.dtype)
        not_target = -torch.expm1(softmax.target_N - softmax.log_sum_exp())
        not_target = torch.where(inside, not_target, 0.0)
        for part in slices(len(result), 256):
            of_target = weight[index_N1[part, 0]].to(self.sum_NH.dtype)
            of_target *= not_target[part, None]
            of_target -= self.sum_NH[part] / softmax.sum_N[part, None]
            result[part] = of_target / t
        return result


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor | None]:
        parts, blocks = _blocks(hidden, weight, how.chunk)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        recorded = how.grad_enabled and any(ctx.needs_input_grad)
        kept: list[Tensor] | None = [] if recorded and len(hidden) * len(weight) <= _KEPT else None
        units: list[_UnitGradient] | None = None
        frozen = needs_hidden and not (needs_weight or needs_bias)
        if recorded and kept is None and frozen and how.softcap is None:
            units = [_UnitGradient(hidden[part]) for part in parts]
        softmaxes = [RunningSoftmax.empty(hidden[part], how.with_entropy) for part in parts]
        for block in blocks:
            head = _factor(weight[block])
            of_block = None if bias is None else bias[block]
            for n, part in enumerate(parts):
                logits = _logits(_factor(hidden[part]), head, of_block, how.softcap)
                index_N = targets[part] - block.start
                if kept is not None:
                    kept.append(logits)
                    logits = logits.clone()
                if units is None:
                    how.kernel.fold(logits, index_N, softmaxes[n], how.temperature)
                else:
                    exponentials, scale_N = online_softmax.fold(
                        logits, index_N, softmaxes[n], how.temperature
                    )
                    units[n].add(exponentials, scale_N, index_N, head)
                    del exponentials
                del logits  # before the next block is allocated
        lse_N = torch.cat([softmax.log_sum_exp() for softmax in softmaxes])
        chosen_N = torch.cat([softmax.target_N for softmax in softmaxes])
        entropy_N = torch.cat([s.entropy() for s in softmaxes]) if how.with_entropy else None
        unit_NH = None
        if units is not None:
            unit_NH = torch.empty_like(hidden)
            for n, part in enumerate(parts):
                unit_NH[part] = units[n].finish(
                    softmaxes[n], weight, targets[part], how.temperature
                )
        ctx.save_for_backward(hidden, weight, bias, targets, lse_N, entropy_N, unit_NH)
        # An entropy that is only logged then has gradient None and costs nothing in backward.
        ctx.set_materialize_grads(False)
        ctx.how, ctx.blocks, ctx.kept = how, (parts, blocks), kept
        return chosen_N - lse_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse_N, entropy_N, unit_NH = ctx.saved_tensors
        if unit_NH is not None and grad_entropy_N is None and grad_log_probs_N is not None:
            return unit_NH * grad_log_probs_N[:, None].to(unit_NH.dtype), *[None] * 4
        parts, blocks = ctx.blocks
        if grad_log_probs_N is None:
            grad_log_probs_N = torch.zeros_like(lse_N)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        new: dict[str, Any] = {
            "dtype": accumulation_dtype(hidden.dtype),
            "device": hidden.device,
        }
        grad_hidden = torch.empty(hidden.shape, **new) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.zeros(len(weight), **new) if needs_bias else None
        kept = None if ctx.kept is None else iter(ctx.kept)
        # Whether the head's gradient can be summed in its own dtype.
        direct = weight.dtype == new["dtype"] or (len(parts) == 1 and weight.is_cuda)
        # The outer loop is over the head, so that a block's gradient is summed in float32 over all
        # rows, without a second tensor of the head's size.
        for block in blocks:
            head = _factor(weight[block])
            of_block = None if bias is None else bias[block]
            sum_weight = None
            if grad_weight is not None:
                sum_weight = grad_weight[block] if direct else torch.empty(head.shape, **new)
            for part in parts:
                rows = _factor(hidden[part])
                if kept is None:
                    logits = _logits(rows, head, of_block, ctx.how.softcap)
                else:
                    logits = next(kept).clone()
                slope = None
                if ctx.how.softcap is not None:  # d c tanh(z / c) / dz = 1 - tanh^2
                    slope = 1 - (logits / ctx.how.softcap).square_()
                grad_logits = ctx.how.kernel.gradient(
                    logits,
                    targets[part] - block.start,
                    lse_N[part],
                    grad_log_probs_N[part],
                    None if entropy_N is None else entropy_N[part],
                    None if grad_entropy_N is None else grad_entropy_N[part],
                    ctx.how.temperature,
                    # Rounded as the gradient of 16-bit logits is.
                    hidden.dtype,
                )
                del logits
                if slope is not None:
                    grad_logits = grad_logits.mul_(slope)
                if grad_bias is not None:
                    grad_bias[block] += grad_logits.sum(dim=0, dtype=grad_bias.dtype)
                grad_logits = grad_logits.to(head.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[part], grad_logits, head, first=block.start == 0)
                if sum_weight is not None:
                    _add_product(sum_weight, grad_logits.t(), rows, first=part.start == 0)
                del grad_logits
            if grad_weight is not None and sum_weight is not None and not direct:
                grad_weight[block] = sum_weight
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )
