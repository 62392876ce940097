"""The memory of the software GPU as tensors of the CPU, and arguments of operations."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Arguments = Sequence[Any]
Options = dict[str, Any]


class NoValuesError(RuntimeError):
    """The CPU cannot compute what this operation would compute on CUDA."""


def is_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def is_cuda_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and tuples."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The same nest with each value converted."""
    if isinstance(value, list | tuple):
        return type(value)(converted(each, convert) for each in value)
    return convert(value)


def all_of(args: Arguments, options: Options) -> Iterator[Any]:
    yield from leaves(args)
    yield from leaves(tuple(options.values()))


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a CUDA tensor."""
    if tensor.is_conj() or tensor.is_neg():
        raise NoValuesError("software GPU: no values of conjugate and negative views")
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = torch.frombuffer(view_of(storage.data_ptr(), storage.nbytes()), dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def view_of(address: int, size: int) -> memoryview:
    """A writable view of the process's memory."""
    writable = 0x200
    return _view(ctypes.c_void_p(address), ctypes.c_ssize_t(size), writable)  # type: ignore[no-any-return]


_view: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object


def share_memory_with_kernels(interpreter: ModuleType) -> None:
    """Let Triton's interpreter work on the device's memory.

    It copies the whole storage of every argument to the host and back at each launch, which the
    software GPU's memory does not need.
    """

    def to_host(_self: Any, args: Arguments, options: Options) -> tuple[Arguments, Options]:
        return [converted(each, host) for each in args], {
            name: converted(each, host) for name, each in options.items()
        }

    def host(value: Any) -> Any:
        return on_cpu(value) if is_cuda(value) else value

    interpreter.GridExecutor._init_args_hst = to_host
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
