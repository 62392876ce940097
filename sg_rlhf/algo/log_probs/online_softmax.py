"""What is done to a block of logits between its matrix products, in three ways.

:func:`fold` takes a block into the softmax of its rows, :func:`slope` turns it into the gradient in
the logits; formulas in :mod:`sg_rlhf.algo.log_probs.fused_log_probs`. ``torch`` is PyTorch's
operations one by one, in place, wherever PyTorch runs. ``compile`` is the same as pure functions by
``torch.compile``, and ``triton`` two kernels of our own
(:mod:`sg_rlhf.algo.log_probs.online_softmax_triton`):
both read a block once and write it at most once, which is where the time goes on a GPU.

Shape suffixes: ``N`` rows of a block, ``C`` its columns; ``index_N`` is the target's column, which
lies in another block where it is below 0 or not below C.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: exp of it is 0 in float32 and float64, and 0 times it is 0, which it is not for -inf.
LOWEST = -1e4


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def target_in(index_N: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether a row's target is in the block, [N], and where there (somewhere, if not), [N, 1]."""
    return (index_N >= 0) & (index_N < columns), index_N.clamp(0, columns - 1)[:, None]


@dataclass
class RunningSoftmax:
    """The softmax of some rows, from one block of the vocabulary after the other.

    Attributes:
        largest_N: logit so far.
        sum_N: of exp(z - largest).
        chosen_N: the target's logit; NaN until it is met, and where it is none of the vocabulary.
        moment_N: sum of exp(z - largest) (z - largest), of which the entropy follows; or None.
    """

    largest_N: Tensor
    sum_N: Tensor
    chosen_N: Tensor
    moment_N: Tensor | None

    @classmethod
    def of(cls, rows: Tensor, with_entropy: bool) -> RunningSoftmax:
        """Of no block yet."""
        new: dict[str, Any] = {"dtype": wide(rows.dtype), "device": rows.device}
        n = len(rows)
        return cls(
            torch.full((n,), -torch.inf, **new),
            torch.zeros(n, **new),
            torch.full((n,), torch.nan, **new),
            torch.zeros(n, **new) if with_entropy else None,
        )

    def log_sum_exp(self) -> Tensor:
        """[N]."""
        return self.largest_N + torch.log(self.sum_N)

    def entropy(self) -> Tensor:
        """[N], in nats."""
        assert self.moment_N is not None
        # Not below 0 by rounding.
        return (torch.log(self.sum_N) - self.moment_N / self.sum_N).clamp(min=0.0)


@dataclass(frozen=True)
class Elementwise:
    """One of the three ways.

    Attributes:
        fold: (logits [N, C], index_N, softmax, temperature): the softmax takes the block, whose
            numbers may be overwritten.
        slope: (logits [N, C], index_N, lse_N, grad_N of the log-probs, entropy_N or None, grad_N of
            the entropy or None, temperature, dtype) -> [N, C] the gradient in the logits before
            they were divided by the temperature, in ``dtype``; may overwrite the logits.
    """

    fold: Callable[..., Any]
    slope: Callable[..., Tensor]


def _rescaling(before_N: Tensor, largest_N: Tensor) -> tuple[Tensor, Tensor]:
    """What to take off the logits, and the factor of the sums until now, both [N].

    Where all logits so far are -inf there is nothing to shift, and -inf - -inf would be NaN.
    """
    shift = torch.where(largest_N == -torch.inf, 0.0, largest_N)
    return shift, torch.exp(before_N - shift)


def fold(
    logits: Tensor, index_N: Tensor, softmax: RunningSoftmax, temperature: float
) -> tuple[Tensor, Tensor]:
    """See :class:`Elementwise`; in place.

    Returns:
        exp(z - largest) [N, C], and exp(largest before - largest) [N].
    """
    if temperature != 1.0:
        logits /= temperature
    inside, index_N1 = target_in(index_N, logits.shape[1])
    # Of the same product as the sum: so no log-prob is above 0.
    found = logits.gather(1, index_N1)[:, 0]
    softmax.chosen_N = torch.where(inside, found, softmax.chosen_N)
    largest = torch.maximum(softmax.largest_N, logits.amax(dim=1))
    shift, carried = _rescaling(softmax.largest_N, largest)
    logits -= shift[:, None]
    if softmax.moment_N is None:
        exponentials = logits.exp_()
        softmax.sum_N = carried * softmax.sum_N + exponentials.sum(dim=1)
    else:
        exponentials = logits.clamp_(min=LOWEST).exp()
        moved = torch.where(softmax.sum_N > 0, softmax.largest_N - shift, 0.0)
        softmax.moment_N = carried * (softmax.moment_N + moved * softmax.sum_N)
        softmax.sum_N = carried * softmax.sum_N + exponentials.sum(dim=1)
        softmax.moment_N += logits.mul_(exponentials).sum(dim=1)
    softmax.largest_N = largest
    return exponentials, carried


def slope(
    logits: Tensor,
    index_N: Tensor,
    lse_N: Tensor,
    grad_N: Tensor,
    entropy_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """See :class:`Elementwise`; in place."""
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
    inside, index_N1 = target_in(index_N, logits.shape[1])
    at_target = torch.where(inside, grad_N, 0.0)
    return log_p.scatter_add_(1, index_N1, at_target[:, None].to(log_p.dtype)).to(dtype)


def pure_fold(
    logits: Tensor,
    index_N: Tensor,
    largest_N: Tensor,
    sum_N: Tensor,
    chosen_N: Tensor,
    moment_N: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(largest, sum, chosen, moment) of :class:`RunningSoftmax` with the block; changes nothing."""
    z = logits / temperature
    inside, index_N1 = target_in(index_N, logits.shape[1])
    chosen = torch.where(inside, z.gather(1, index_N1)[:, 0], chosen_N)
    largest = torch.maximum(largest_N, z.amax(dim=1))
    shift, carried = _rescaling(largest_N, largest)
    shifted = z - shift[:, None]
    exponentials = shifted.exp()
    total = carried * sum_N + exponentials.sum(dim=1)
    if moment_N is None:
        return largest, total, chosen, None
    moved = torch.where(sum_N > 0, largest_N - shift, 0.0)
    of_block = (exponentials * shifted.clamp(min=LOWEST)).sum(dim=1)
    return largest, total, chosen, carried * (moment_N + moved * sum_N) + of_block


def pure_slope(
    logits: Tensor,
    index_N: Tensor,
    lse_N: Tensor,
    grad_N: Tensor,
    entropy_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """As :func:`slope`; changes nothing."""
    log_p = logits / temperature - lse_N[:, None]
    p = log_p.exp()
    column = torch.arange(logits.shape[1], device=logits.device)
    at_target = (column == index_N[:, None]).to(p.dtype)
    gradient = (at_target - p) * grad_N[:, None]
    if entropy_N is not None and grad_entropy_N is not None:
        surprise = log_p.clamp(min=LOWEST) + entropy_N[:, None]
        gradient = gradient - p * surprise * grad_entropy_N[:, None]
    return (gradient / temperature).to(dtype)


def of_pure(folded: Callable[..., Any], sloped: Callable[..., Tensor]) -> Elementwise:
    """Of functions like :func:`pure_fold` and :func:`pure_slope`."""

    def into(logits: Tensor, index_N: Tensor, softmax: RunningSoftmax, temperature: float) -> None:
        softmax.largest_N, softmax.sum_N, softmax.chosen_N, softmax.moment_N = folded(
            logits,
            index_N,
            softmax.largest_N,
            softmax.sum_N,
            softmax.chosen_N,
            softmax.moment_N,
            temperature,
        )

    return Elementwise(into, sloped)


@functools.cache
def compiled() -> Elementwise:
    """Made, and then compiled for the shapes that come."""
    # The number of rows differs from batch to batch; that is no reason to compile again.
    return of_pure(torch.compile(pure_fold, dynamic=True), torch.compile(pure_slope, dynamic=True))
