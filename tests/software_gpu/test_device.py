"""The software GPU's memory, inter-process handles, virtual memory and events.

Run with the Python of an environment in which device/build.py has put it. Kernels do nothing, so
tensors are filled by copies from the host.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.software_gpu import children
from tests.software_gpu.children import Machine, ready

MIB = 2**20
GIB = 2**30
CONTEXT_MIB = 520
#: What PyTorch reserves for a small and for a large tensor.
SMALL_MIB, LARGE_MIB = 2, 20
NOT_INITIALIZED = 3
pytestmark = pytest.mark.skipif(children.missing() is not None, reason=str(children.missing()))


# -- memory ----------------------------------------------------------------------------------------


def allocate(mib: str) -> None:
    import torch

    kept = torch.empty(int(mib) * MIB, dtype=torch.uint8, device="cuda")
    ready()
    del kept


def test_memory_of_all_processes_counts_until_they_end_however_they_end(machine: Machine) -> None:
    with machine.started(allocate, 512) as first:
        assert machine.used_mib() == [CONTEXT_MIB + 512]
        with machine.started(allocate, 256):
            assert machine.used_mib() == [2 * CONTEXT_MIB + 512 + 256]
            machine.run(see_free, 4096 - 3 * CONTEXT_MIB - 512 - 256)
            first.send_signal(signal.SIGKILL)
            # Nobody has reaped it yet.
            wait_until(lambda: machine.used_mib() == [CONTEXT_MIB + 256])
    assert machine.used_mib() == [0]


def wait_until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def see_free(mib: str) -> None:
    import torch

    assert torch.cuda.mem_get_info() == (int(mib) * MIB, 4 * GIB)


def out_of_memory() -> None:
    import torch

    fitting = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 4\.00 GiB"):
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    del fitting
    torch.cuda.empty_cache()
    torch.empty(3 * GIB + 500 * MIB, dtype=torch.uint8, device="cuda")


def test_memory_ends_at_the_limit_and_is_given_back(machine: Machine) -> None:
    machine.run(out_of_memory)


def fork_with_memory() -> None:
    """A child may not use what its parent has initialised, and does not count its memory again."""
    runtime = ctypes.CDLL("libcudart.so.13")
    count, address = ctypes.c_int(), ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(address), 64 * MIB) == 0
    child = os.fork()
    if child == 0:
        os._exit(runtime.cudaGetDeviceCount(ctypes.byref(count)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == NOT_INITIALIZED
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert total.value - free.value == (CONTEXT_MIB + 64) * MIB


def test_a_forked_child_cannot_use_cuda_and_leaves_the_count_alone(machine: Machine) -> None:
    machine.run(fork_with_memory)
    assert machine.used_mib() == [0]


def fork_before_use() -> None:
    import pynvml

    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 1
    child = os.fork()
    if child == 0:
        runtime, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
        os._exit(runtime.cudaMalloc(ctypes.byref(address), 64 * MIB))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == 0


def test_a_child_may_use_cuda_where_its_parent_has_used_nvml_alone(machine: Machine) -> None:
    machine.run(fork_before_use)


def execute_another_program() -> None:
    runtime, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(address), 64 * MIB) == 0
    os.execv(sys.executable, [sys.executable, __file__, "take_nothing_but_a_context"])


def take_nothing_but_a_context() -> None:
    assert ctypes.CDLL("libcudart.so.13").cudaSetDevice(0) == 0
    ready()


def test_a_program_that_replaces_another_starts_without_its_memory(machine: Machine) -> None:
    with machine.started(execute_another_program):
        assert machine.used_mib() == [CONTEXT_MIB]


def pinned_memory() -> None:
    import torch

    values = torch.arange(1000.0)
    pinned = values.pin_memory()
    assert pinned.is_pinned()
    assert not values.is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), values)
    runtime = torch.cuda.cudart()
    size = values.numel() * values.element_size()
    assert int(runtime.cudaHostRegister(values.data_ptr(), size, 0)) == 0
    assert values.is_pinned()
    assert int(runtime.cudaHostUnregister(values.data_ptr())) == 0
    assert not values.is_pinned()
    assert torch.cuda.mem_get_info()[0] == 4 * GIB - (CONTEXT_MIB + SMALL_MIB) * MIB


def test_pinned_memory_is_known_as_such_and_takes_none_of_the_device(machine: Machine) -> None:
    machine.run(pinned_memory)


def copies() -> None:
    import torch

    for size, copied in ((1000, True), (MIB // 4 + 1, False)):
        values = torch.arange(float(size))
        there = values.cuda()
        assert torch.equal(there.cpu(), values) is copied


def test_copies_above_the_limit_are_left_out(machine: Machine) -> None:
    machine.run(copies, SOFTWARE_GPU_COPY_LIMIT_MIB="1")


# -- between processes -----------------------------------------------------------------------------


def export(file: str) -> None:
    """Write the handles of two tensors; the second starts within an allocation."""
    import pickle

    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randint(-99, 99, (size,), generator=generator).cuda() for size in (7, 3 * MIB)]
    Path(file).write_bytes(pickle.dumps([reduce_tensor(tensor) for tensor in tensors]))
    ready()
    assert int(tensors[0][0].cpu()) == 12345


def open_exported(file: str) -> None:
    import pickle

    import torch

    generator = torch.Generator().manual_seed(1)
    for size, (function, arguments) in zip(
        (7, 3 * MIB), pickle.loads(Path(file).read_bytes()), strict=True
    ):
        tensor = function(*arguments)
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), torch.randint(-99, 99, (size,), generator=generator))
        tensor[0].copy_(torch.tensor(12345))
    # The exporter's memory is not counted again.
    assert torch.cuda.memory.mem_get_info()[0] == 4 * GIB - (2 * CONTEXT_MIB + 2 + 24) * MIB


def test_a_tensor_is_the_same_memory_in_another_process(machine: Machine, tmp_path: Path) -> None:
    with machine.started(export, tmp_path / "handles") as child:
        machine.run(open_exported, tmp_path / "handles")
        assert child.communicate("\n")[0] == ""
        assert child.returncode == 0
    assert machine.used_mib() == [0]


def refused_handles() -> None:
    """Of this process; of freed memory in another."""
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    address, handle = ctypes.c_void_p(), Handle()
    assert runtime.cudaMalloc(ctypes.byref(address), MIB) == 0
    assert runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address) == 0
    other = ctypes.c_void_p()
    assert runtime.cudaIpcOpenMemHandle(ctypes.byref(other), handle, 1) != 0
    print(bytes(handle).hex(), flush=True)
    assert runtime.cudaFree(address) == 0
    ready()


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


def open_handle(text: str) -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    address, handle = ctypes.c_void_p(), Handle.from_buffer_copy(bytes.fromhex(text))
    assert runtime.cudaIpcOpenMemHandle(ctypes.byref(address), handle, 1) != 0


def test_a_handle_of_freed_memory_is_refused(machine: Machine) -> None:
    child = machine.start(refused_handles)
    assert child.stdout
    lines = [next(child.stdout) for _ in range(3)]
    assert "the handle is of this process" in lines[0]
    assert "[software GPU]" in machine.run(open_handle, lines[1].strip())
    child.communicate("\n")
    assert child.returncode == 0


# -- virtual memory --------------------------------------------------------------------------------


def sleep_and_wake() -> None:
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    values = torch.randn(64 * MIB // 4)
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.empty_like(values, device="cuda").copy_(values)
    with allocator.use_memory_pool(tag="cache"):
        cache = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    address = weights.data_ptr()
    awake = torch.cuda.mem_get_info()[0]
    allocator.sleep(offload_tags="weights")
    assert torch.cuda.mem_get_info()[0] == awake + GIB + 64 * MIB
    allocator.wake_up()
    assert torch.cuda.mem_get_info()[0] == awake
    assert weights.data_ptr() == address
    assert torch.equal(weights.cpu(), values)
    assert cache.is_cuda


def test_sleep_mode_gives_memory_back_and_restores_the_weights(machine: Machine) -> None:
    machine.run(sleep_and_wake)


def expandable_segments() -> None:
    import torch

    values = torch.randn(30 * MIB // 4)
    first, second = values.cuda(), values.cuda()
    assert torch.equal(first.cpu(), values)
    before = torch.cuda.mem_get_info()[0]
    del first, second
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before + 60 * MIB


def test_expandable_segments_map_and_unmap(machine: Machine) -> None:
    machine.run(expandable_segments, PYTORCH_ALLOC_CONF="expandable_segments:True")


# -- streams, events, graphs -----------------------------------------------------------------------


def streams_and_events() -> None:
    import torch

    stream = torch.cuda.Stream(priority=-1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        time.sleep(0.05)
        end.record()
    assert stream.priority == -1
    assert stream.query()
    assert end.query()
    assert 50 <= start.elapsed_time(end) < 5000
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(torch.cuda.Event(enable_timing=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()


def test_events_measure_the_time_between_their_records(machine: Machine) -> None:
    machine.run(streams_and_events)


if __name__ == "__main__":
    children.main(globals())
