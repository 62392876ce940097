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
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sg_rlhf.overlay.errors import NonFiniteError

#: What DeepSpeed's ZeRO optimizers take the gradient norm of a parameter group by, just before
#: they step. It is reduced over ranks, and -1 stands for one that is NaN or infinite.
GROUP_NORMS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


#: Parameters that a message names; of the others it tells the number.
SHOWN = 3

#: Of a model: its parameters by name.
Named = Callable[[], Iterable[tuple[str, Any]]]


class Faults:
    """Which parameters have a gradient that is not finite, as long as their optimizer has it.

    Args:
        optimizer: of DeepSpeed.
        named: the model's parameters.
    """

    def __init__(self, optimizer: Any, named: Named) -> None:
        self._optimizer, self._named = optimizer, named
        self._found: set[str] = set()

    def look(self, *given: Any) -> None:
        """At a parameter group; every rank has a part of it and calls this.

        Args:
            given: what a function of :data:`GROUP_NORMS` takes: gradients and parameters, or the
                parameters alone, whose norms the optimizer has.
        """
        *gradients, params = given
        if gradients:
            bad = [p for g, p in zip(gradients[0], params, strict=False) if not _is_finite(g)]
        else:
            norms = self._optimizer.norm_for_param_grads
            ids = {p: self._optimizer.get_param_id(p) for p in params}
            bad = [p for p in params if not math.isfinite(float(norms.get(ids[p], 0.0)))]
        names = {id(parameter): name for name, parameter in self._named()}
        own = [names[id(p)] for p in bad if id(p) in names]
        self._found |= {name for of_rank in gathered(own) for name in of_rank}

    def look_at_all(self) -> None:
        """As :meth:`look`, at every group of ZeRO 1 and 2, which skip a step before any norm."""
        optimizer, self._found = self._optimizer, set()
        for i, params in enumerate(getattr(optimizer, "params_in_partition", ())):
            given = () if optimizer.cpu_offload else (optimizer.averaged_gradients[i],)
            self.look(*given, params)

    def error(self, step: int) -> NonFiniteError:
        """The error of an optimizer step, with what was found since the last."""
        order = {name: i for i, (name, _) in enumerate(self._named())}
        found, self._found = sorted(self._found, key=order.__getitem__), set()
        names = ", ".join(found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        of = f" ({names}{more})" if found else ""
        return NonFiniteError(
            f"the gradient has NaN or infinite entries{of}, though the loss is finite, at "
            f"optimizer step {step}: nothing was trained on it"
        )


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())


def watch(optimizer: Any, named: Named, next_step: Callable[[], int], zero_stage: int) -> Faults:
    """Have the optimizer's step raise ``NonFiniteError`` before such a gradient is applied.

    Args:
        optimizer: of DeepSpeed; only below ZeRO 2 may it be one without the norms.
        named: the model's parameters, for the message.
        next_step: the number of the step that is about to be taken, for the message.
        zero_stage: ``ds.zero_stage``.

    Returns:
        What was found, for a step that DeepSpeed skips by itself.
    """
    faults = Faults(optimizer, named)
    for name in GROUP_NORMS:
        if zero_stage < 2 and not hasattr(optimizer, name):
            continue
        # The class's own function: a second trainer of this optimizer puts its own watch.
        norm_of = getattr(type(optimizer), name).__get__(optimizer)
        setattr(optimizer, name, functools.partial(_finite_norm, norm_of, next_step, faults))
    if hasattr(optimizer, "params_in_partition"):
        has_overflow = type(optimizer).has_overflow.__get__(optimizer)
        optimizer.has_overflow = functools.partial(_overflow, has_overflow, faults)
    return faults


def _finite_norm(
    norm_of: Callable[..., Any], next_step: Callable[[], int], faults: Faults, *given: Any
) -> Any:
    norm = norm_of(*given)
    if not float(norm) >= 0.0:
        faults.look(*given)
        raise faults.error(next_step())
    return norm


def _overflow(has_overflow: Callable[..., bool], faults: Faults, *args: Any, **kwargs: Any) -> bool:
    found = has_overflow(*args, **kwargs)
    if found:
        faults.look_at_all()
    return found


class _NotTaken(Exception):
    """Leaves ZeRO 3's step before it changes anything; every rank raises it."""


class SkippingWatch:
    """Has the optimizer pass over the steps that :func:`watch` would raise at, on all ranks.

    Args:
        optimizer: DeepSpeed's of ZeRO 1, 2 or 3.
        named: the model's parameters.
        scheduler: of the learning rate.
        scaled: whether the optimizer searches a loss scale (fp16). What it skips for that is its
            own business, unless a loss was not finite.

    Attributes:
        at_fault: whether a loss of this rank was not finite since the last optimizer step. Its
            gradient may be finite all the same, and the other ranks do not know of it.
        skipped: whether the latest optimizer step was skipped for this; the same on all ranks.
        faults: what of its gradient was not finite.
    """

    def __init__(self, optimizer: Any, named: Named, scheduler: Any, scaled: bool) -> None:
        self.faults = Faults(optimizer, named)
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
        overflow = has_overflow(*args, **kwargs)
        if overflow and not self._scaled:
            self.faults.look_at_all()
        return overflow or self._found

    def _norm(self, norm_of: Callable[..., Any], *given: Any) -> Any:
        norm = norm_of(*given)
        if not float(norm) >= 0.0:
            self.faults.look(*given)
        if self._found or not float(norm) >= 0.0:
            raise _NotTaken
        return norm


def gathered(of_rank: Any) -> list[Any]:
    """One object of every rank, on every rank."""
    size = torch.distributed.get_world_size()
    found: list[Any] = [of_rank] * size
    if size > 1:
        torch.distributed.all_gather_object(found, of_rank)
    return found


def _on_any_rank(found: bool) -> bool:
    flag = torch.tensor(int(found), device=torch.cuda.current_device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag)
