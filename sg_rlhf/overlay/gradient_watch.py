"""No optimizer step on a gradient that is not finite.

ZeRO 3 would step: it looks for an overflow with fp16 alone, and its norm over all groups is finite
again, sqrt(2) for two groups of -1. It computes the norms in any case, so the check costs a number
read per group. Every rank has the same norms and raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
