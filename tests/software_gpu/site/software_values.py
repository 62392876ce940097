"""Compute the values of CUDA operations on the CPU, over the software GPU's memory.

The software GPU's memory is host memory, and its kernels do nothing. ``SoftwareValues`` sees each
operation of PyTorch before it reaches CUDA. CUDA's own host code runs first: it checks arguments,
allocates results and advances generators. Then the CPU's kernel computes over the same memory.
An operation that the CPU cannot compute raises ``NoValuesError``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import software_aten_ops
import software_attention
import software_vllm_ops
import torch
from software_memory import (
    Arguments,
    NoValuesError,
    Options,
    all_of,
    converted,
    is_cuda,
    is_cuda_device,
    leaves,
    on_cpu,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Operation = Any  # torch._ops.OpOverload


# ---- which rule applies to an operation -----------------------------------------------------

#: Operations that give memory, describe it or read it as it is.
WITHOUT_VALUES = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "set_", "resize_", "record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense",
})  # fmt: skip
#: NCCL of the software GPU moves and adds values itself; the others have none.
WITHOUT_KERNELS = frozenset({"c10d", "_c10d_functional", "profiler", "prim"})
#: Their operators are Python functions that call other operators.
WRITTEN_IN_PYTHON = frozenset({"vllm", "torch_attn"})
#: They replace all of the tensor they write, whatever it holds.
REPLACING = frozenset({
    "copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "random_",
    "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip

CUDA_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def name_of(operation: Operation) -> str:
    """Its name without namespace and overload: "add_" of aten::add_.Tensor."""
    return str(operation._schema.name).split("::")[1]


@functools.cache
def is_composite(operation: Operation) -> bool:
    """Whether it only calls other operations, which reach the mode one by one.

    Autograd decomposes them. In inference mode, and inside the mode, nothing has yet. Some have a
    kernel of CUDA besides (silu_backward), which takes less memory.
    """
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, operation.name())
    return bool(has_kernel("CompositeImplicitAutograd")) and not has_kernel("CUDA")


@functools.cache
def has_no_values(operation: Operation) -> bool:
    """Views, metadata and communication: CUDA's host code does all of their work."""
    if operation.name() in FORMULAS:
        return False
    if operation.namespace in WITHOUT_KERNELS or name_of(operation) in WITHOUT_VALUES:
        return True
    results = operation._schema.returns
    views = [each.alias_info is not None and not each.alias_info.is_write for each in results]
    return bool(views) and all(views)


def shape_depends_on_data(operation: Operation, args: Arguments, options: Options) -> bool:
    """nonzero, masked_select, unique, indexing by a mask ...

    CUDA's host code would wait for a kernel's result, which does not come, to size its own.
    """
    name = name_of(operation)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return has_mask(args[1]) and not is_masked_fill(name, args, options)
    if name == "repeat_interleave" and options.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in operation.tags


def has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def is_masked_fill(name: str, args: Arguments, options: Options) -> bool:
    """x[mask] = number: PyTorch fills without a wait (canDispatchToMaskedFill)."""
    if name != "index_put_" or len(args) > 3 or options.get("accumulate"):
        return False
    indices, value = [each for each in args[1] if each is not None], args[2]
    return len(indices) == 1 and value.numel() == 1 and not value.is_cuda


# ---- arguments ------------------------------------------------------------------------------


def cpu_value(value: Any) -> Any:
    """An argument of a CUDA operation as the CPU's kernel takes it."""
    if is_cuda(value):
        return on_cpu(value)
    if is_cuda_device(value):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None  # draw_like has seeded the default generator
    return value


def cpu_arguments(args: Arguments, options: Options) -> tuple[Arguments, Options]:
    named = {name: converted(value, cpu_value) for name, value in options.items()}
    if named.get("pin_memory"):
        named["pin_memory"] = False
    return [converted(value, cpu_value) for value in args], named


def device_of(args: Arguments, options: Options) -> torch.device:
    """The CUDA device that an operation runs on."""
    for value in all_of(args, options):
        if is_cuda(value):
            return value.device  # type: ignore[no-any-return]
    for value in all_of(args, options):
        if is_cuda_device(value) and value.index is not None:
            return value  # type: ignore[no-any-return]
    return torch.device("cuda", torch.cuda.current_device())


# ---- random numbers -------------------------------------------------------------------------


@contextmanager
def draw_like(generator: torch.Generator, offset: int) -> Iterator[None]:
    """Let the CPU's default generator stand for a CUDA generator during one operation.

    Its seed comes from the seed and the offset of the CUDA generator. CUDA's host code advances
    the offset. So seeds, ``get_state``, ``set_state`` and ``fork_rng`` work as on CUDA, and the
    CPU's own sequence of random numbers does not change.
    """
    text = f"{generator.initial_seed()} {offset} {generator.device.index}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def generator_of(args: Arguments, options: Options) -> torch.Generator:
    for value in all_of(args, options):
        if isinstance(value, torch.Generator):
            return value
    default: torch.Generator = torch.cuda.default_generators[device_of(args, options).index]
    return default


# ---- values ---------------------------------------------------------------------------------


def without_values(**_: Any) -> None:
    """It starts kernels, and nothing but kernels of CUDA reads their results."""


#: Values of operations that have no CPU kernel for all of their arguments. Each takes the
#: arguments by the names of the operation's schema, and returns what the operation returns.
FORMULAS: dict[str, Callable[..., Any]] = {
    "c10d::barrier": without_values,
    "_vllm_fa3_C::get_scheduler_metadata": without_values,
    **software_aten_ops.FORMULAS,
    **software_attention.FORMULAS,
    **software_vllm_ops.FORMULAS,
}


def by_name(operation: Operation, args: Arguments, options: Options) -> Options:
    """Every argument by its name in the schema, defaults included."""
    schema = operation._schema.arguments
    named = {each.name: each.default_value for each in schema}
    named.update(zip((each.name for each in schema), args, strict=False))
    return {**named, **options}


def cpu_values(operation: Operation, args: Arguments, options: Options) -> Any:
    """What the operation gives on the CPU. Tensors that it writes are written."""
    args, options = cpu_arguments(args, options)
    formula = FORMULAS.get(operation.name())
    if formula is not None:
        return formula(**by_name(operation, args, options))
    try:
        return operation(*args, **options)
    except NotImplementedError as error:
        raise NoValuesError(
            f"software GPU: {operation.name()} has no CPU kernel; add a formula to FORMULAS "
            f"({str(error).splitlines()[0]})"
        ) from error


def tensors_it_changes(operation: Operation, args: Arguments) -> list[Tensor]:
    """CUDA tensors whose present values the operation reads and replaces."""
    # Operators of vLLM only start kernels, and what they write may be a whole KV cache.
    if operation.namespace != "aten" or not operation._schema.is_mutable:
        return []
    if name_of(operation) in REPLACING:
        return []
    written = [
        value
        for argument, value in zip(operation._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [each for each in leaves(written) if is_cuda(each)]


def host_code(operation: Operation, args: Arguments, options: Options) -> Any:
    """CUDA's own code for an operation. Only here may it start kernels."""
    expect_launches(1)
    try:
        result = operation(*args, **options)
    finally:
        expect_launches(0)
    if isinstance(result, list):  # some of vLLM's operators give None for a tensor
        return [torch.empty(0, device="cuda") if each is None else each for each in result]
    return result


def compute(operation: Operation, args: Arguments, options: Options, limit: int | None) -> Any:
    """Run CUDA's host code, then the CPU's kernel, and give CUDA's results the CPU's values."""
    if limit and sum(t.numel() for t in all_of(args, options) if isinstance(t, Tensor)) > limit:
        return host_code(operation, args, options)
    changed = tensors_it_changes(operation, args)
    # Host code may copy from a result without values (such copies are no kernels).
    before = [on_cpu(each).clone() for each in changed]
    drawing: Any = nullcontext()
    if torch.Tag.nondeterministic_seeded in operation.tags:
        generator = generator_of(args, options)
        drawing = draw_like(generator, generator.get_offset())
    result = host_code(operation, args, options)
    for tensor, values in zip(changed, before, strict=True):
        on_cpu(tensor).copy_(values)
    with drawing:
        return with_values(operation, result, cpu_values(operation, args, options))


def with_values(operation: Operation, result: Any, values: Any) -> Any:
    """``result`` after the copy of ``values`` into it. Values that are no tensors replace it."""
    if values is None:  # it wrote into its arguments
        return result
    if not isinstance(result, Tensor | list | tuple):
        return values
    for ours, value in zip(leaves(result), leaves(values), strict=True):
        if value is None and operation.name() in FORMULAS:
            continue  # a result that nobody reads, such as the state of a dropout
        if not isinstance(ours, Tensor) or not isinstance(value, Tensor):
            if ours is not value and ours != value:
                raise NoValuesError(f"software GPU: {operation.name()} gives {value!r} on the CPU")
            continue
        if ours.shape != value.shape or ours.dtype != value.dtype:
            raise NoValuesError(
                f"software GPU: {operation.name()} gives {ours.dtype} {tuple(ours.shape)} on CUDA "
                f"and {value.dtype} {tuple(value.shape)} on the CPU"
            )
        target = on_cpu(ours) if ours.is_cuda else ours
        if target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
            target.copy_(value)
    return result


def compute_with_shape(operation: Operation, args: Arguments, options: Options) -> Any:
    """Compute on the CPU alone, wait as CUDA's host code does, and copy the results."""
    device = device_of(args, options)
    if options.get("out") is not None:
        raise NoValuesError(f"software GPU: {operation.name()} into a given tensor")
    for value in all_of(args, options):
        # CUDA's host code would check it. Indices alone may be on the CPU.
        elsewhere = isinstance(value, Tensor) and value.dim() and value.device != device
        if elsewhere and not name_of(operation).lstrip("_").startswith("index"):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {value.device} "
                f"and {device} ({operation.name()})"
            )
    wait(device)
    values = cpu_values(operation, args, options)
    if operation._schema.is_mutable:
        return args[0]
    return converted(values, functools.partial(copy_to, device=device))


def wait(device: torch.device) -> None:
    """Read a value of the device: torch.cuda.set_sync_debug_mode reports it."""
    torch.empty(1, device=device).item()


def copy_to(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    on_cpu(copy).copy_(value)
    return copy


class SoftwareValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The rules, in their order. Inside this method the mode is off."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        limit = os.environ.get("SOFTWARE_GPU_VALUES_LIMIT")
        self.limit = int(limit) if limit else None

    def __torch_dispatch__(
        self, operation: Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options: Options = kwargs or {}
        if not any(is_cuda(each) or is_cuda_device(each) for each in all_of(args, options)):
            return operation(*args, **options)
        if is_composite(operation):
            with self:
                return operation.decompose(*args, **options)
        if operation.namespace in WRITTEN_IN_PYTHON:
            with self:
                return operation.redispatch(CUDA_KEY, *args, **options)
        if has_no_values(operation):
            return operation(*args, **options)
        if shape_depends_on_data(operation, args, options):
            return compute_with_shape(operation, args, options)
        return compute(operation, args, options, self.limit)


#: In a process that computes values the device refuses to start a kernel unless this thread has
#: said that the kernel's values are computed. So nothing is left out silently: not in a thread
#: without the mode, and not by code that starts kernels without an operation of PyTorch.
expect_launches = ctypes.PyDLL("libcuda.so.1").software_gpu_expect_launches


# ---- installation ---------------------------------------------------------------------------


def install() -> None:
    """Turn the mode on in this thread and in each thread that it starts."""
    # Their results come from kernels whose intermediate results (log sums, seeds) have other
    # shapes than the CPU's. The math backend consists of operations with values.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    SoftwareValues().__enter__()  # type: ignore[no-untyped-call]
    start = threading.Thread.start

    def start_with_values(thread: threading.Thread) -> None:
        run = thread.run

        def run_with_values() -> None:
            with SoftwareValues():
                run()

        thread.run = run_with_values  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_with_values  # type: ignore[assignment, method-assign]
