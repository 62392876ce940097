"""What on CUDA would make the host wait for the device, found without one.

Tensors on "meta" have shapes and no values, so code that asks for a value there raises:
``.item()``, ``float()``, ``bool()``, ``tolist()``, a loop over entries. What needs no value and
waits all the same is found by its operation: an output whose shape depends on values (a boolean
index, ``nonzero``), a copy from one device to another, and a tensor made of the host's numbers
(``torch.tensor(..., device=...)``), which is such a copy.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

DEVICE = torch.device("meta")
#: Operations whose output has as many entries as the values say.
SHAPED_BY_VALUES = ("nonzero", "masked_select", "unique", "_unique", "bincount", "repeat_interl")
#: Functions that make a tensor of numbers, out of reach of a dispatch mode.
FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


class HostReadError(RuntimeError):
    """An operation that waits for the device."""


class NoHostReads(ExitStack):
    """While it is entered, an operation on ``DEVICE`` that the host would wait for raises."""

    def __enter__(self) -> NoHostReads:
        self.enter_context(_Operations())
        self.enter_context(_FromNumbers())
        super().__enter__()
        return self


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        on_device = [x for x in tensors if _on_device(x)]
        if on_device and name.startswith(SHAPED_BY_VALUES):
            raise HostReadError(f"{name}: the shape of its result depends on values")
        by_mask = name.startswith("index") and any(x.dtype == torch.bool for x in tensors[1:])
        if on_device and by_mask:
            raise HostReadError(f"{name}: an index by a mask")
        # A number of the host may take part without a copy, more than one may not.
        if on_device and any(x.dim() for x in tensors if not _on_device(x)):
            raise HostReadError(f"{name}: tensors of two devices")
        result = func(*args, **kwargs)
        made = _tensors(result)
        if name in ("_to_copy", "copy_") and len({x.device for x in (*tensors, *made)}) > 1:
            raise HostReadError(f"{name}: a copy from one device to another")
        return result


class _FromNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in FROM_NUMBERS and _on_device(result) and not _on_device(args[-1]):
            raise HostReadError(f"{func.__name__}: copies the host's numbers to the device")
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


def _on_device(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == DEVICE.type
