"""A second device on a machine that has none: the values are real, mixing devices is an error.

Tensors on it are on "meta", the device that torch needs no driver for, and hold a tensor of the
CPU. An operation that CUDA would refuse for its operands' devices raises, and so does a cumulative
sum that CUDA has no deterministic kernel for. All else computes what the CPU computes, bit for bit.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DEVICE = torch.device("meta")
#: Operations that may read one device and write the other.
ACROSS = ("_to_copy", "copy_")
#: Operations on the device whose result the host reads.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
#: Operations on the device whose indices may be on the CPU.
INDEXED = ("index.Tensor", "index_put")


class Waits:
    """How often the host has read a tensor of the device, each of which waits for it."""

    count = 0


class CurrentDevice(str):
    """What ``torch.cuda.current_device()`` gives; upstream also formats it into "cuda:{index}"."""

    def __format__(self, spec: str) -> str:
        return "0"


class OnDevice(torch.Tensor):
    """A tensor on the pretended device; ``held`` are its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held})"

    def tolist(self) -> Any:
        """The values; torch's own reads the memory of a tensor, and this one has none."""
        Waits.count += 1
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """torch.tensor(values, device=...) fills its memory out of reach of a dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


class PretendDevice(ExitStack):
    """While it is entered, a tensor made on ``DEVICE`` or moved there is an ``OnDevice``."""

    def __enter__(self) -> PretendDevice:
        self.enter_context(_Operations())
        self.enter_context(_Literals())
        super().__enter__()
        return self


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_device = on_device_before = any(isinstance(x, OnDevice) for x in tensors)
    name = str(func).removeprefix("aten.")
    if on_device and not name.startswith(ACROSS):
        _check(name, args, tensors)
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if on_device_before and (name.startswith(READS) or not on_device):
        Waits.count += 1
    result = func(*tree_map(_values, args), **tree_map(_values, kwargs))
    if func._schema.is_mutable:  # in place
        return args[0]
    return tree_map(_on_device, result) if on_device else result


def _values(x: Any) -> Any:
    return x.held if isinstance(x, OnDevice) else x


def _on_device(x: Any) -> Any:
    return OnDevice(x) if isinstance(x, torch.Tensor) else x


def _check(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    if name.startswith(INDEXED) and isinstance(args[0], OnDevice):
        return
    together = any(isinstance(arg, (list, tuple)) for arg in args)  # torch.cat and the like
    if any(not isinstance(x, OnDevice) and (together or x.dim() > 0) for x in tensors):
        found = ", ".join(f"{x.device.type} {tuple(x.shape)}" for x in tensors)
        raise RuntimeError(f"{name}: tensors on different devices: {found}")
    if name.startswith("cumsum") and tensors[0].is_floating_point():
        raise RuntimeError(f"{name}: no deterministic kernel for {tensors[0].dtype} on the device")
