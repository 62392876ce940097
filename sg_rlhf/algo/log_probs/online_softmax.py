"""Softmax statistics of a row of logits, accumulated block by block over the vocabulary.

:func:`fold` adds a block of logits to the running softmax of its rows (online softmax, arXiv
1805.02867). :func:`logit_gradient` turns a block of logits into the gradient in these logits. The
formulas are in :mod:`sg_rlhf.algo.log_probs.fused_log_probs`. Both work in place.

Shape suffixes: ``N`` rows of a block, ``C`` columns of a block. ``index_N`` is the target's column
relative to the block. It is below 0 or at least C where the target lies in another block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Lower limit of a shifted logit where it is multiplied by its exponential. exp of it is 0 in
#: float32 and float64, and 0 * LOWEST is 0, while 0 * -inf is NaN.
LOWEST = -1e4


def slices(length: int, size: int) -> list[slice]:
    """Consecutive slices of at most ``size`` that cover ``length``."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums for inputs of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def target_columns(index_N: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether the target is in the block, bool [N], and its column, limited to it, [N, 1]."""
    return (index_N >= 0) & (index_N < columns), index_N.clamp(0, columns - 1)[:, None]


@dataclass
class RunningSoftmax:
    """The softmax of N rows of logits over the blocks seen so far.

    Attributes:
        max_N: the largest logit.
        sum_N: sum of exp(z - max).
        target_N: the target's logit; NaN where no block had it.
        moment_N: sum of exp(z - max) (z - max), for the entropy; None without it.
    """

    max_N: Tensor
    sum_N: Tensor
    target_N: Tensor
    moment_N: Tensor | None

    @classmethod
    def empty(cls, rows: Tensor, with_entropy: bool) -> RunningSoftmax:
        """The state before the first block; ``rows`` [N, ...] gives N, the device and the dtype."""
        new: dict[str, Any] = {"dtype": accumulation_dtype(rows.dtype), "device": rows.device}
        n = len(rows)
        return cls(
            torch.full((n,), -torch.inf, **new),
            torch.zeros(n, **new),
            torch.full((n,), torch.nan, **new),
            torch.zeros(n, **new) if with_entropy else None,
        )

    def log_sum_exp(self) -> Tensor:
        """log sum_j exp(z_j), [N]."""
        return self.max_N + torch.log(self.sum_N)

    def entropy(self) -> Tensor:
        """Entropy of the softmax in nats, [N]; needs ``moment_N``."""
        assert self.moment_N is not None
        # Rounding could make it negative.
        return (torch.log(self.sum_N) - self.moment_N / self.sum_N).clamp(min=0.0)


def rescaling(before_N: Tensor, max_N: Tensor) -> tuple[Tensor, Tensor]:
    """``(shift_N, scale_N)``: to subtract from the logits; factor of the sums so far.

    The shift is 0 where all logits so far are -inf: -inf - -inf is NaN.
    """
    shift_N = torch.where(max_N == -torch.inf, 0.0, max_N)
    return shift_N, torch.exp(before_N - shift_N)


def fold(
    logits: Tensor, index_N: Tensor, softmax: RunningSoftmax, temperature: float
) -> tuple[Tensor, Tensor]:
    """Add a block of logits to the running softmax of its rows, in place.

    Args:
        logits: [N, C], before the division by the temperature; overwritten.
        temperature: T > 0.

    Returns:
        ``(exponentials, scale_N)``: exp(z - max), [N, C], and exp(max before - max), [N].
    """
    if temperature != 1.0:
        logits /= temperature
    inside_N, index_N1 = target_columns(index_N, logits.shape[1])
    # Taken from the same product as the sum, so that no log-prob is above 0.
    softmax.target_N = torch.where(inside_N, logits.gather(1, index_N1)[:, 0], softmax.target_N)
    max_N = torch.maximum(softmax.max_N, logits.amax(dim=1))
    shift_N, scale_N = rescaling(softmax.max_N, max_N)
    logits -= shift_N[:, None]
    if softmax.moment_N is None:
        exponentials = logits.exp_()
        softmax.sum_N = scale_N * softmax.sum_N + exponentials.sum(dim=1)
    else:
        exponentials = logits.clamp_(min=LOWEST).exp()
        moved_N = torch.where(softmax.sum_N > 0, softmax.max_N - shift_N, 0.0)
        softmax.moment_N = scale_N * (softmax.moment_N + moved_N * softmax.sum_N)
        softmax.sum_N = scale_N * softmax.sum_N + exponentials.sum(dim=1)
        softmax.moment_N += logits.mul_(exponentials).sum(dim=1)
    softmax.max_N = max_N
    return exponentials, scale_N


def logit_gradient(
    logits: Tensor,
    index_N: Tensor,
    lse_N: Tensor,
    grad_N: Tensor,
    entropy_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient in a block of logits, in place.

    Args:
        logits: [N, C], before the division by the temperature; overwritten.
        lse_N: log-sum-exp of the whole rows, after the division by the temperature.
        grad_N: gradient of the loss in the log-probs.
        entropy_N, grad_entropy_N: entropy of the rows and the gradient in it, or None.
        temperature: T > 0.

    Returns:
        [N, C] in ``dtype``: the gradient in the logits before the division by the temperature.
    """
    if temperature != 1.0:
        logits /= temperature
        grad_N = grad_N / temperature
    log_p = logits.sub_(lse_N[:, None])
    if entropy_N is None or grad_entropy_N is None:
        log_p.exp_().mul_(-grad_N[:, None])
    else:
        p = log_p.exp()
        # p log p is 0 at p = 0.
        log_p.clamp_(min=LOWEST).add_(entropy_N[:, None])
        log_p.mul_((grad_entropy_N / temperature)[:, None])
        log_p.add_(grad_N[:, None]).mul_(p).neg_()
    inside_N, index_N1 = target_columns(index_N, logits.shape[1])
    at_target_N = torch.where(inside_N, grad_N, 0.0)
    return log_p.scatter_add_(1, index_N1, at_target_N[:, None].to(log_p.dtype)).to(dtype)


@dataclass(frozen=True)
class BlockKernel:
    """The element-wise operations on a block, as :func:`fold` and :func:`logit_gradient`."""

    fold: Callable[..., Any]
    gradient: Callable[..., Tensor]


TORCH_KERNEL = BlockKernel(fold, logit_gradient)
