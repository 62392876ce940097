"""No optimizer step on a gradient that is not finite.

DeepSpeed 0.19.8 skips such a step under ZeRO 1, 2 and 3, and says nothing. The trainer reads
``was_step_applied`` and stops the run with the names of the parameters. With
``sg.on_nonfinite=skip`` it goes on: the step counts in the engine's steps, and the learning rate's
schedule moves by one step, which DeepSpeed leaves out. So every later step has the rate that the
run's plan gives it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sg_rlhf.overlay.reporting.errors import NonFiniteError

#: What DeepSpeed's ZeRO optimizers compute the gradient norm of a parameter group with, just before
#: they step. The norm is reduced over ranks.
GROUP_NORMS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")
#: DeepSpeed's norm of a gradient that is not finite.
INVALID = -1.0
#: Parameters that a message names; of the others it tells the number.
SHOWN = 3

#: Of a model: its parameters by name.
Named = Callable[[], Iterable[tuple[str, Any]]]


class GradientFaults:
    """Which parameters have a gradient that is not finite, read while the optimizer has it.

    Args:
        optimizer: of DeepSpeed.
        named: the model's parameters.
    """

    def __init__(self, optimizer: Any, named: Named) -> None:
        self._optimizer, self._named = optimizer, named
        self._found: set[str] = set()
        # The class's own functions: a second trainer of this optimizer puts its own watch.
        kind = type(optimizer)
        for name in GROUP_NORMS:
            if hasattr(kind, name):
                norm_of = getattr(kind, name).__get__(optimizer)
                setattr(optimizer, name, functools.partial(self._norm, norm_of))
        if hasattr(optimizer, "params_in_partition"):  # ZeRO 1 and 2 may skip before any norm
            has_overflow = kind.has_overflow.__get__(optimizer)
            optimizer.has_overflow = functools.partial(self._overflow, has_overflow)

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

    def _norm(self, norm_of: Callable[..., Any], *given: Any) -> Any:
        norm = norm_of(*given)
        if not float(norm) >= 0.0:
            self.look(*given)
        return norm

    def _overflow(self, has_overflow: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        overflow = has_overflow(*args, **kwargs)
        if overflow:
            optimizer, self._found = self._optimizer, set()
            for i, params in enumerate(optimizer.params_in_partition):
                given = () if optimizer.cpu_offload else (optimizer.averaged_gradients[i],)
                self.look(*given, params)
        return overflow

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


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())


class StepSkipper:
    """Has the optimizer skip a step on all ranks where the loss of one was not finite.

    Args:
        optimizer: DeepSpeed's of ZeRO 1, 2 or 3.
        named: the model's parameters, for a message.
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
        self.faults = GradientFaults(optimizer, named)
        self._optimizer, self._scheduler, self._scaled = optimizer, scheduler, scaled
        self.at_fault = False
        self.skipped = False
        self._found = False
        optimizer.step = functools.partial(self._step, type(optimizer).step.__get__(optimizer))
        for name in GROUP_NORMS:
            setattr(optimizer, name, functools.partial(self._norm, getattr(optimizer, name)))

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._found, self.at_fault = _on_any_rank(self.at_fault), False
        step(*args, **kwargs)
        self.skipped = bool(self._optimizer.overflow) and (self._found or not self._scaled)
        if self.skipped:
            self._scheduler.step()

    def _norm(self, norm_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = norm_of(*args, **kwargs)
        return torch.full_like(torch.as_tensor(norm), INVALID) if self._found else norm


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
