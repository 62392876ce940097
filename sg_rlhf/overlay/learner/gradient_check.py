"""Names the parameters whose gradient is not finite.

DeepSpeed 0.19.8 skips an optimizer step on such a gradient, on all ranks and under ZeRO 1, 2 and 3,
without a message. The update reads ``was_step_applied`` and stops the run with these names, or logs
the skipped step (:mod:`sg_rlhf.overlay.learner.nonfinite`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sg_rlhf.common.text import listed
from sg_rlhf.overlay.checkpoints import consensus
from sg_rlhf.overlay.reporting.errors import NonFiniteError

#: Methods of DeepSpeed's ZeRO optimizers that compute the gradient norm of a parameter group over
#: all ranks, just before the step.
_GROUP_NORMS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")
#: Parameters named in a message; it counts the others.
_MAX_NAMED = 3

#: Gives a model's parameters by name.
NamedParameters = Callable[[], Iterable[tuple[str, torch.nn.Parameter]]]


class GradientFaults:
    """Finds the parameters whose gradient is not finite, while the optimizer has it.

    Replaces methods of the live optimizer, as the gradients are gone after its step.
    """

    def __init__(self, optimizer: Any, named: NamedParameters) -> None:
        self._optimizer, self._named = optimizer, named
        self._names: set[str] = set()
        # The class's own methods: a second trainer of this optimizer replaces the first one's.
        kind = type(optimizer)
        for name in _GROUP_NORMS:
            if hasattr(kind, name):
                compute = getattr(kind, name).__get__(optimizer)
                setattr(optimizer, name, functools.partial(self._norm, compute))
        if hasattr(optimizer, "params_in_partition"):  # ZeRO 1 and 2 may skip before any norm
            has_overflow = kind.has_overflow.__get__(optimizer)
            optimizer.has_overflow = functools.partial(self._overflow, has_overflow)

    def error(self, step: int) -> NonFiniteError:
        """The error of an optimizer step, with the names found since the last call."""
        names = [name for name, _ in self._named() if name in self._names]
        self._names = set()
        where = f" ({listed(names, _MAX_NAMED)})" if names else ""
        return NonFiniteError(
            f"the gradient has NaN or infinite entries{where}, though the loss is finite, at "
            f"optimizer step {step}: nothing was trained on it"
        )

    def _norm(self, compute: Callable[..., float], *group: Any) -> float:
        norm = compute(*group)
        if not float(norm) >= 0.0:
            self.record_nonfinite(*group)
        return norm

    def _overflow(self, has_overflow: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        overflow = has_overflow(*args, **kwargs)
        if overflow:
            optimizer, self._names = self._optimizer, set()
            for i, params in enumerate(optimizer.params_in_partition):
                gradients = () if optimizer.cpu_offload else (optimizer.averaged_gradients[i],)
                self.record_nonfinite(*gradients, params)
        return overflow

    def record_nonfinite(self, *group: Any) -> None:
        """Add the names of a parameter group's gradients that are not finite; on every rank."""
        *gradients, params = group
        if gradients:
            bad = [p for g, p in zip(gradients[0], params, strict=False) if not _is_finite(g)]
        else:
            norms = self._optimizer.norm_for_param_grads
            ids = {p: self._optimizer.get_param_id(p) for p in params}
            bad = [p for p in params if not math.isfinite(float(norms.get(ids[p], 0.0)))]
        names = {id(parameter): name for name, parameter in self._named()}
        local = [names[id(p)] for p in bad if id(p) in names]
        self._names |= {name for of_rank in consensus.all_gather_objects(local) for name in of_rank}


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())
