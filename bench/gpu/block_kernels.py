"""Other implementations of the operations on a block of logits, for comparison on a GPU.

:mod:`sg_rlhf.algo.log_probs.online_softmax` runs PyTorch's operations one by one. ``compile`` is
the same as pure functions under ``torch.compile``; ``triton`` is two hand-written kernels
(``block_kernels_triton``). Both read a block once and write it at most once. No recipe selects
them: a GPU run decides which becomes the default.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sg_rlhf.algo.log_probs.online_softmax import (
    LOWEST,
    TORCH_KERNEL,
    BlockKernel,
    RunningSoftmax,
    rescaling,
    target_columns,
)


def pure_fold(
    logits: Tensor,
    index_N: Tensor,
    max_N: Tensor,
    sum_N: Tensor,
    target_N: Tensor,
    moment_N: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(max, sum, target, moment) of :class:`RunningSoftmax` with the block; changes nothing."""
    z = logits / temperature
    inside, index_N1 = target_columns(index_N, logits.shape[1])
    target = torch.where(inside, z.gather(1, index_N1)[:, 0], target_N)
    max_new_N = torch.maximum(max_N, z.amax(dim=1))
    shift, scale_N = rescaling(max_N, max_new_N)
    shifted = z - shift[:, None]
    exponentials = shifted.exp()
    total = scale_N * sum_N + exponentials.sum(dim=1)
    if moment_N is None:
        return max_new_N, total, target, None
    moved = torch.where(sum_N > 0, max_N - shift, 0.0)
    of_block = (exponentials * shifted.clamp(min=LOWEST)).sum(dim=1)
    return max_new_N, total, target, scale_N * (moment_N + moved * sum_N) + of_block


def pure_gradient(
    logits: Tensor,
    index_N: Tensor,
    lse_N: Tensor,
    grad_N: Tensor,
    entropy_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """As :func:`~sg_rlhf.algo.log_probs.online_softmax.logit_gradient`; changes nothing."""
    log_p = logits / temperature - lse_N[:, None]
    p = log_p.exp()
    column = torch.arange(logits.shape[1], device=logits.device)
    at_target = (column == index_N[:, None]).to(p.dtype)
    gradient = (at_target - p) * grad_N[:, None]
    if entropy_N is not None and grad_entropy_N is not None:
        surprise = log_p.clamp(min=LOWEST) + entropy_N[:, None]
        gradient = gradient - p * surprise * grad_entropy_N[:, None]
    return (gradient / temperature).to(dtype)


def from_pure(folded: Callable[..., Any], gradient: Callable[..., Tensor]) -> BlockKernel:
    """A kernel of functions like :func:`pure_fold` and :func:`pure_gradient`."""

    def fold(logits: Tensor, index_N: Tensor, softmax: RunningSoftmax, temperature: float) -> None:
        softmax.max_N, softmax.sum_N, softmax.target_N, softmax.moment_N = folded(
            logits,
            index_N,
            softmax.max_N,
            softmax.sum_N,
            softmax.target_N,
            softmax.moment_N,
            temperature,
        )

    return BlockKernel(fold, gradient)


@functools.cache
def compiled() -> BlockKernel:
    """The pure functions under ``torch.compile``."""
    # The number of rows differs from batch to batch; that is no reason to compile again.
    return from_pure(
        torch.compile(pure_fold, dynamic=True), torch.compile(pure_gradient, dynamic=True)
    )


def triton_kernel() -> BlockKernel:
    """The Triton kernels; imported only here, since torch for the CPU comes without Triton."""
    kernel: BlockKernel = importlib.import_module(f"{__package__}.block_kernels_triton").KERNEL
    return kernel


KERNELS: dict[str, Callable[[], BlockKernel]] = {
    "torch": lambda: TORCH_KERNEL,
    "compile": compiled,
    "triton": triton_kernel,
}
