"""No optimizer step on a gradient that is not finite.

ZeRO 3 would step: it looks for an overflow with fp16 alone, and its norm over all groups is finite
again, sqrt(2) for two groups of -1. It computes the norms in any case, so the check costs a number
read per group. Every rank has the same norms and raises.

With ``sg.on_nonfinite=skip`` such a step is what an overflow of fp16 is to DeepSpeed: not taken,
its gradients cleared, counted in the engine's steps. The learning rate's schedule goes on, which
with fp16 waits: so every later step has the rate that the run's plan gives it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sg_rlhf.overlay.errors import NonFiniteError

#: What DeepSpeed's ZeRO optimizers take the gradient norm of a parameter group by, just before
#: they step. It is reduced over ranks, and -1 stands for one that is NaN or infinite.
GROUP_NORMS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


def watch(optimizer: Any, next_step: Callable[[], int], zero_stage: int) -> None:
    """Have the optimizer's step raise ``NonFiniteError`` before such a gradient is applied.

    Args:
        optimizer: of DeepSpeed; only below ZeRO 2 may it be one without the norms.
        next_step: the number of the step that is about to be taken, for the message.
        zero_stage: ``ds.zero_stage``.
    """
    for name in GROUP_NORMS:
        if zero_stage < 2 and not hasattr(optimizer, name):
            continue
        # The class's own function: a second trainer of this optimizer puts its own watch.
        norm_of = getattr(type(optimizer), name).__get__(optimizer)
        setattr(optimizer, name, functools.partial(_finite_norm, norm_of, next_step))


def non_finite(step: int) -> NonFiniteError:
    """The error of an optimizer step."""
    return NonFiniteError(
        "the gradient has NaN or infinite entries, though the loss is finite, at optimizer step "
        f"{step}: nothing was trained on it"
    )


def _finite_norm(
    norm_of: Callable[..., Any], next_step: Callable[[], int], *args: Any, **kwargs: Any
) -> Any:
    norm = norm_of(*args, **kwargs)
    if not float(norm) >= 0.0:
        raise non_finite(next_step())
    return norm


class _NotTaken(Exception):
    """Leaves ZeRO 3's step before it changes anything; every rank raises it."""


class SkippingWatch:
    """Has the optimizer pass over the steps that :func:`watch` would raise at, on all ranks.

    Args:
        optimizer: DeepSpeed's of ZeRO 1, 2 or 3.
        scheduler: of the learning rate.
        scaled: whether the optimizer searches a loss scale (fp16). What it skips for that is its
            own business, unless a loss was not finite.

    Attributes:
        at_fault: whether a loss of this rank was not finite since the last optimizer step. Its
            gradient may be finite all the same, and the other ranks do not know of it.
        skipped: whether the latest optimizer step was skipped for this; the same on all ranks.
    """

    def __init__(self, optimizer: Any, scheduler: Any, scaled: bool) -> None:
        self._optimizer, self._scheduler, self._scaled = optimizer, scheduler, scaled
        self.at_fault = False
        self.skipped = False
        self._found = False
        kind = type(optimizer)
        optimizer.step = functools.partial(self._step, kind.step.__get__(optimizer))
        # ZeRO 1 and 2 ask it before every step, but not in float32; ZeRO 3 with fp16 alone.
        if hasattr(optimizer, "check_grad_overflow"):
            optimizer.check_grad_overflow = True
        optimizer.has_overflow = functools.partial(
            self._has_overflow, kind.has_overflow.__get__(optimizer)
        )
        for name in GROUP_NORMS:
            norm_of = getattr(kind, name).__get__(optimizer)
            setattr(optimizer, name, functools.partial(self._norm, norm_of))

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        optimizer = self._optimizer
        self._found, self.at_fault = _on_any_rank(self.at_fault), False
        optimizer.overflow = False  # of a checkpoint
        try:
            step(*args, **kwargs)
        except _NotTaken:
            optimizer.overflow = True
            optimizer._overflow_clean_up(optimizer.loss_scale)
        self.skipped = bool(optimizer.overflow) and (self._found or not self._scaled)
        if self.skipped:
            self._scheduler.step()

    def settled(self) -> None:
        """The engine has counted the step. Without fp16 ZeRO 3 never takes an overflow back: saved
        with the optimizer, it would end every step of a run that is resumed with ``stop``."""
        self._optimizer.overflow = False

    def _has_overflow(self, has_overflow: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        return has_overflow(*args, **kwargs) or self._found

    def _norm(self, norm_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = norm_of(*args, **kwargs)
        if self._found or not float(norm) >= 0.0:
            raise _NotTaken
        return norm


def _on_any_rank(found: bool) -> bool:
    flag = torch.tensor(int(found), device=torch.cuda.current_device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag)
