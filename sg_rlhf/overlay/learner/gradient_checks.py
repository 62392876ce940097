"""Checks of an optimizer step's gradients: all are finite, and every trainable tensor has one.

:class:`GradientFaults` names the parameters whose gradient is not finite. DeepSpeed 0.19.8 skips
such a step on all ranks, without a message. The update reads ``was_step_applied`` and stops the run
with these names, or logs the skipped step (:mod:`.nonfinite`).

:class:`UpdateWatch` checks that the first optimizer step trained every trainable tensor. Upstream
has trained with 390 of 417 tensors silently frozen (its issue 1258). Comparing weights cannot tell:
at a warm-up's learning rate of 1e-8 a norm's weight of 1.0 does not move even in float32. So hooks
follow the gradient. Two cases stop the run:

- the tensor's module ran with gradients on, but no gradient came back: cut off from the loss;
- the optimizer has no part of the tensor.

Two are lines in the trainer's log: a gradient of exactly zero (LoRA's A in its first step, a bias
of keys) and a module that did not run (an expert without a token). The check waits for a step whose
gradient norm is above 0: equal rewards in all groups give none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from sg_rlhf.common.text import listed
from sg_rlhf.overlay.checkpoints import consensus
from sg_rlhf.overlay.reporting.errors import FrozenError, NonFiniteError

#: Methods of DeepSpeed's ZeRO optimizers that compute the gradient norm of a parameter group over
#: all ranks, just before the step.
_GROUP_NORMS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")
#: Parameters that a message names; it counts the others.
_MAX_NONFINITE_NAMED, _MAX_FROZEN_NAMED = 3, 8

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
        where = f" ({listed(names, _MAX_NONFINITE_NAMED)})" if names else ""
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
            pairs = zip(gradients[0], params, strict=False)
            bad = [p for g, p in pairs if g is not None and not bool(torch.isfinite(g).all())]
        else:
            norms = self._optimizer.norm_for_param_grads
            ids = {p: self._optimizer.get_param_id(p) for p in params}
            bad = [p for p in params if not math.isfinite(float(norms.get(ids[p], 0.0)))]
        names = {id(parameter): name for name, parameter in self._named()}
        local = [names[id(p)] for p in bad if id(p) in names]
        self._names |= {name for of_rank in consensus.all_gather_objects(local) for name in of_rank}


class TensorReport(NamedTuple):
    """Observations of a tensor in the first optimizer step, by one rank or by any rank."""

    forward_ran: bool = False
    has_grad: bool = False
    non_zero_grad: bool = False
    in_optimizer: bool = False


class UpdateWatch:
    """Hooks on a model's trainable tensors until its first step with a gradient."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        index_of = {p: i for i, (_, p) in enumerate(self._parameters)}
        self._ran: set[int] = set()
        self._non_zero: dict[int, torch.Tensor] = {}
        self._has_grad: set[int] = set()
        self._hooks = [
            p.register_hook(self._gradient_hook(i))  # type: ignore[no-untyped-call]
            for p, i in index_of.items()
        ]
        # The fused log-probs use the head's weight without its forward.
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for module in model.modules():
            indices = [index_of[p] for p in module.parameters(recurse=False) if p in index_of]
            if module is head:
                self._ran.update(indices)
            elif indices:
                self._hooks.append(module.register_forward_pre_hook(self._forward_hook(indices)))

    def _forward_hook(self, indices: Sequence[int]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if torch.is_grad_enabled():
                self._ran.update(indices)

        return hook

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._has_grad.add(index)
            # The largest magnitude, NaN if one is: without a copy, and without waiting for it.
            largest = torch.linalg.vector_norm(gradient.detach(), float("inf"))
            before = self._non_zero.get(index)
            self._non_zero[index] = largest != 0 if before is None else before | (largest != 0)

        return hook

    def forget_gradients(self) -> None:
        """Drop the gradients of an optimizer step that was not taken."""
        self._non_zero.clear()

    def result(self) -> list[str]:
        """Remove the hooks and check, after a step, on every rank; raises FrozenError."""
        for hook in self._hooks:
            hook.remove()
        local = [
            TensorReport(
                i in self._ran,
                i in self._has_grad,
                bool(self._non_zero.get(i, False)),
                is_in_optimizer(parameter, self._optimizer),
            )
            for i, (_, parameter) in enumerate(self._parameters)
        ]
        reports = torch.tensor(local, dtype=torch.int32, device=torch.cuda.current_device())
        torch.distributed.all_reduce(reports, op=torch.distributed.ReduceOp.MAX)
        names = [name for name, _ in self._parameters]
        return evaluate(names, [TensorReport(*row) for row in reports.bool().tolist()])


def evaluate(names: Sequence[str], reports: Sequence[TensorReport]) -> list[str]:
    """Check what all ranks together saw of each tensor; see :meth:`UpdateWatch.result`."""
    pairs = list(zip(names, reports, strict=True))
    cut_off = [name for name, r in pairs if r.forward_ran and not r.has_grad]
    not_owned = [name for name, r in pairs if not r.in_optimizer]
    frozen = {"no gradient comes back to": cut_off, "the optimizer has no part of": not_owned}
    count = len({*cut_off, *not_owned})
    if count:
        lines = (
            f"{fault} {listed(tensors, _MAX_FROZEN_NAMED)}"
            for fault, tensors in frozen.items()
            if tensors
        )
        raise FrozenError(
            f"the first optimizer step did not train {count} of {len(names)} tensors: "
            f"{'; '.join(lines)}; freeze tensors that should not be trained"
        )
    remarks = {
        "its module did not run": [n for n, r in pairs if not (r.forward_ran or r.has_grad)],
        "a gradient of exactly zero": [n for n, r in pairs if r.has_grad and not r.non_zero_grad],
    }
    return [f"{remark}: {', '.join(tensors)}" for remark, tensors in remarks.items() if tensors]


def is_in_optimizer(parameter: Any, optimizer: Any) -> bool:
    """Whether this rank's partition of the optimizer, if any, has a part of a parameter."""
    if hasattr(parameter, "ds_id"):  # ZeRO 3
        swapped = getattr(optimizer, "optimizer_swapper", None) is not None
        if swapped or not hasattr(optimizer, "grad_position"):
            return True
        position = optimizer.grad_position.get(optimizer.get_param_id(parameter))
        if position is None:
            return False
        # Behind the tensor's last number a partition is padding.
        size = position[2]
        start = size * torch.distributed.get_rank(parameter.ds_process_group)
        return bool(parameter.ds_numel > start)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2, and float32 copies of bf16
        return parameter._hp_mapping is not None
    return True
