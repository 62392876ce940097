"""After the first optimizer step: did every trainable tensor take part in it?

Upstream has trained with 390 of 417 tensors silently frozen (its issue 1258). "Its numbers changed"
cannot tell: at a warm-up's learning rate of 1e-8 a norm's weight of 1.0 does not move even in
float32, and in bf16 hardly a tensor does in a step at 1e-6. So the check follows the gradient,
which no learning rate hides, to where it could be lost:

- the tensor's module ran with gradients on, but none came back: cut off from the loss;
- the optimizer has no part of the tensor;
- a gradient that is not zero came, and the optimizer's state is zero: lost on the way;
- the model computes with other numbers than the optimizer's float32 ones, rounded.

Each of these stops the run. What happens in a sane run is a line in the trainer's log: a gradient
of exactly zero (LoRA's A in its first step, as B is zero; a bias of keys, to which softmax is
blind) and a module that did not run (an expert without a token, a vision tower without an image).
The first step whose gradient has a norm above 0 decides: equal rewards in all groups give none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sg_rlhf.overlay.reporting.errors import FrozenError

#: Names in a message; the log has all.
SHOWN = 8

#: Numbers that are compared at a time: a copy of the largest tensor may not fit.
PART = 2**24

RAN, REACHED, NON_ZERO, OWNED, TAKEN, UNLIKE = range(6)

#: What stops a run, by what the ranks found together, of a tensor that has a rank's True in each
#: of the first columns and in none of the second.
ERRORS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("no gradient comes back to", (RAN,), (REACHED,)),
    ("the optimizer has no part of", (), (OWNED,)),
    ("the gradient is lost before the optimizer's state of", (NON_ZERO, OWNED), (TAKEN,)),
    ("the model does not have the optimizer's numbers of", (UNLIKE,), ()),
)
NOTES: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("its module did not run", (), (RAN, REACHED)),
    ("a gradient of exactly zero", (REACHED,), (NON_ZERO,)),
)


class UpdateWatch:
    """Hooks on a model's trainable tensors until its first step with a gradient."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Put the hooks on.

        Args:
            model: inside DeepSpeed's engine.
            optimizer: DeepSpeed's.
        """
        self._optimizer = optimizer
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        places = {p: place for place, (_, p) in enumerate(self._parameters)}
        self._found = [[False] * 6 for _ in self._parameters]
        self._non_zero: dict[int, torch.Tensor] = {}
        self._hooks = [
            parameter.register_hook(self._reached(place)) for parameter, place in places.items()
        ]
        # A head may be used without its forward: see fused_log_probs.
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for module in model.modules():
            own = [places[p] for p in module.parameters(recurse=False) if p in places]
            if module is head:
                self._mark(own, RAN)
            elif own:
                self._hooks.append(module.register_forward_pre_hook(self._ran(own)))

    def _mark(self, places: Sequence[int], column: int) -> None:
        for place in places:
            self._found[place][column] = True

    def _ran(self, own: Sequence[int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._mark(own, RAN)

        return hook

    def _reached(self, place: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._found[place][REACHED] = True
            non_zero = _largest(gradient.detach()) != 0  # stays on the device: nobody waits
            before = self._non_zero.get(place)
            self._non_zero[place] = non_zero if before is None else before | non_zero

        return hook

    def forget_gradients(self) -> None:
        """Of an optimizer step that was not taken; the next one is judged by its own."""
        self._non_zero.clear()

    def verdict(self) -> list[str]:
        """Take the hooks off and judge, after an optimizer step; every rank together.

        Returns:
            A line for each kind of remark.

        Raises:
            FrozenError: tensors that the step did not train, though it should have.
        """
        for hook in self._hooks:
            hook.remove()
        for place, non_zero in self._non_zero.items():
            self._found[place][NON_ZERO] = bool(non_zero)
        for (_, parameter), found in zip(self._parameters, self._found, strict=True):
            found[OWNED], found[TAKEN], found[UNLIKE] = of_optimizer(parameter, self._optimizer)
        device = torch.cuda.current_device()
        found_by_all = torch.tensor(self._found, dtype=torch.int32, device=device)
        torch.distributed.all_reduce(found_by_all, op=torch.distributed.ReduceOp.MAX)
        names = [name for name, _ in self._parameters]
        return evaluate(names, found_by_all.bool().tolist())


def evaluate(names: Sequence[str], found: Sequence[Sequence[bool]]) -> list[str]:
    """The remarks on tensors of which this was found; see :meth:`Watch.verdict`."""

    def matching(kinds: Any) -> dict[str, list[str]]:
        return {
            what: [
                name
                for name, of in zip(names, found, strict=True)
                if all(of[i] for i in there) and not any(of[i] for i in absent)
            ]
            for what, there, absent in kinds
        }

    frozen = matching(ERRORS)
    count = len(set().union(*frozen.values()))
    if count:
        lines = (f"{what} {_listed(n)}" for what, n in frozen.items() if n)
        raise FrozenError(
            f"the first optimizer step did not train {count} of {len(names)} tensors: "
            f"{'; '.join(lines)}; freeze what shall not be trained, or set "
            "sg.check_trained=false to train the rest"
        )
    return [f"{what}: {', '.join(n)}" for what, n in matching(NOTES).items() if n]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def of_optimizer(parameter: Any, optimizer: Any) -> tuple[bool, bool, bool]:
    """What this rank's part of DeepSpeed's optimizer has of a parameter.

    Returns:
        Whether it has a part of it; whether its state is not zero; whether the model's numbers are
        other than the float32 ones rounded. Where the optimizer keeps no such parts (ZeRO 0 in
        float32, state on a disk): as if all were well.
    """
    part = _part(parameter, optimizer)
    if part is None:
        return True, True, False
    model, master, states = part
    if master.numel() == 0:
        return False, False, False
    taken = not states or any(bool(_largest(state) != 0) for state in states)
    parts = zip(model.split(PART), master.split(PART), strict=True)
    unlike = any(not torch.equal(m, o.to(m.dtype).to(m.device)) for m, o in parts)
    return True, taken, unlike


def _part(parameter: Any, optimizer: Any) -> tuple[Any, Any, list[Any]] | None:
    """The model's numbers of this rank's part, the optimizer's, and its moments."""
    none = torch.empty(0)
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        swapped = getattr(optimizer, "optimizer_swapper", None) is not None
        if swapped or not hasattr(optimizer, "grad_position"):
            return None
        place = optimizer.grad_position.get(optimizer.get_param_id(parameter))
        if place is None:
            return none, none, []
        group, start, size = place
        # Behind a tensor's last number a partition is padded with whatever was in that memory, NaN
        # among it.
        before = size * torch.distributed.get_rank(parameter.ds_process_group)
        count = min(size, max(0, parameter.ds_numel - before))
        whole = optimizer.fp32_partitioned_groups_flat[group]
        model = parameter.ds_tensor.data.flatten()[:count]
        state = optimizer.optimizer.state.get(whole, {})
        moments = [s.narrow(0, start, count) for s in state.values() if _shaped(s, whole)]
        return model, whole.data.narrow(0, start, count), moments
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1, ZeRO-2 and float32 copies of bf16
        part = parameter._hp_mapping
        if part is None:  # another rank's
            return none, none, []
        where = part.lp_fragment_address
        model = parameter.data.flatten().narrow(0, where.start, where.numel)
        return model, part.hp_fragment.data, list((part.optim_fragment or {}).values())
    return None


def _largest(numbers: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, NaN if one is; without a copy, for which there may be no memory."""
    return torch.linalg.vector_norm(numbers, float("inf"))


def _shaped(state: Any, whole: torch.Tensor) -> bool:
    return torch.is_tensor(state) and state.shape == whole.shape
