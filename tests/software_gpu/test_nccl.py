"""The software GPU's NCCL: collectives of 2 and 4 processes against values computed on the CPU.

Run with the Python of an environment in which device/build.py has put it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.software_gpu import children
from tests.software_gpu.children import Machine

COUNT = 1001
pytestmark = pytest.mark.skipif(children.missing() is not None, reason=str(children.missing()))


def join(rank: str, size: str, file: str) -> tuple[int, int]:
    """Start the process group of a rank on its device."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "nccl", init_method=f"file://{file}", rank=int(rank), world_size=int(size),
        device_id=torch.device("cuda", int(rank)),
    )  # fmt: skip
    return int(rank), int(size)


def inputs(size: int, count: int, dtype: Any) -> list[Any]:
    """Each rank's input, the same on all ranks. Sums and products of integers are exact."""
    import torch

    generator = torch.Generator().manual_seed(count)
    values = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(size)]
    return [(value if dtype.is_floating_point else 3 * value.abs()).to(dtype) for value in values]


def reduced(values: list[Any], name: str) -> Any:
    """Expected result. As in NCCL, 16-bit numbers are added as 32-bit ones."""
    import torch

    dtype = values[0].dtype
    wide = [value.float() if dtype.itemsize == 2 else value for value in values]
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MAX": torch.maximum,
        "MIN": torch.minimum,
    }  # fmt: skip
    total = wide[0]
    for value in wide[1:]:
        total = functions[name](total, value)
    return (total / len(values) if name == "AVG" else total).to(dtype)


def reductions(rank: str, size: str, file: str) -> None:
    import torch
    import torch.distributed as dist

    me, ranks = join(rank, size, file)
    floating = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    integers = [torch.int8, torch.uint8, torch.int32, torch.int64]
    for dtype in floating + integers:
        names = ["SUM", "PRODUCT", "MAX", "MIN"] + (["AVG"] if dtype in floating else [])
        for name in names:
            operation = getattr(dist.ReduceOp, name)
            values = inputs(ranks, COUNT, dtype)
            tensor = values[me].cuda()
            dist.all_reduce(tensor, operation)
            check(tensor, reduced(values, name))

            tensor = values[me].cuda()
            dist.reduce(tensor, dst=1, op=operation)
            check(tensor, reduced(values, name) if me == 1 else values[me])

            values = inputs(ranks, ranks * COUNT, dtype)
            part = torch.empty(COUNT, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(part, values[me].cuda(), operation)
            check(part, reduced(values, name)[me * COUNT : (me + 1) * COUNT])
    dist.destroy_process_group()


def check(found: Any, expected: Any) -> None:
    import torch

    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def exchanges(rank: str, size: str, file: str) -> None:
    import torch
    import torch.distributed as dist

    me, ranks = join(rank, size, file)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    for dtype in [*dtypes, torch.float8_e4m3fn]:
        values = inputs(ranks, COUNT, dtype)
        tensor = values[me].cuda()
        dist.broadcast(tensor, src=ranks - 1)
        check(tensor.view(torch.uint8), values[-1].view(torch.uint8))

        whole = torch.empty(ranks * COUNT, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(whole, values[me].cuda())
        check(whole.view(torch.uint8), torch.cat([v.view(torch.uint8) for v in values]))

    values = inputs(ranks, ranks * COUNT, torch.float32)
    whole = torch.empty(ranks * COUNT, device="cuda")
    dist.all_to_all_single(whole, values[me].cuda())
    check(whole, torch.cat([value[me * COUNT : (me + 1) * COUNT] for value in values]))

    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": me, "text": "x" * me})
    assert objects == [{"rank": i, "text": "x" * i} for i in range(ranks)]
    dist.barrier()
    messages(me, ranks)
    groups(me, ranks)
    dist.destroy_process_group()


def messages(me: int, ranks: int) -> None:
    """Two in each direction of a ring, which block unless they run together; then single ones."""
    import torch
    import torch.distributed as dist

    values = inputs(ranks, 4 * COUNT, torch.bfloat16)
    after, before = (me + 1) % ranks, (me - 1) % ranks
    sent = values[me].cuda().chunk(4)
    received = torch.empty(4 * COUNT, dtype=torch.bfloat16, device="cuda")
    places = received.chunk(4)
    operations = [
        *(dist.P2POp(dist.isend, sent[i], after) for i in (0, 1)),
        *(dist.P2POp(dist.isend, sent[i], before) for i in (2, 3)),
        *(dist.P2POp(dist.irecv, places[i], before) for i in (0, 1)),
        *(dist.P2POp(dist.irecv, places[i], after) for i in (2, 3)),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check(received, torch.cat([values[before][: 2 * COUNT], values[after][2 * COUNT :]]))

    tensor = values[me].cuda()
    if me == 0:
        dist.send(tensor, dst=1)
    elif me == 1:
        dist.recv(tensor, src=0)
        check(tensor, values[0])


def groups(me: int, ranks: int) -> None:
    """Coalesced collectives; communicators of some of the ranks."""
    import torch
    import torch.distributed as dist

    values = inputs(ranks, COUNT, torch.float32)
    outputs = [torch.empty(ranks * COUNT, device="cuda") for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("cuda", me)):
        for i, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, (values[me] + i).cuda())
    for i, output in enumerate(outputs):
        check(output, torch.cat(values) + i)

    even, odd = list(range(0, ranks, 2)), list(range(1, ranks, 2))
    parts = [dist.new_group(members) for members in (even, odd)]
    tensor = values[me].cuda()
    dist.all_reduce(tensor, group=parts[me % 2])
    check(tensor, reduced([values[i] for i in (odd if me % 2 else even)], "SUM"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("function", [reductions, exchanges])
def test_results_are_those_of_the_cpu(
    machine: Machine, size: int, function: Callable[[str, str, str], None]
) -> None:
    machine.ranks(function, size)
    assert machine.used_mib() == [0]
    assert list(machine.table.parent.glob(f"{machine.table.name}.nccl.*")) == []


def vllm_communicator(rank: str, size: str, port: str) -> None:
    import torch
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    me, ranks = int(rank), int(size)
    group = StatelessProcessGroup.create("127.0.0.1", int(port), me, ranks)
    torch.cuda.set_device(me)
    communicator = PyNcclCommunicator(group, device=torch.device("cuda", me))
    values = inputs(ranks, COUNT, torch.bfloat16)
    check(communicator.all_reduce(values[me].cuda()), reduced(values, "SUM"))
    tensor = values[me].cuda()
    communicator.broadcast(tensor, src=0)
    check(tensor, values[0])
    communicator.group_start()
    communicator.send(values[me].cuda(), (me + 1) % ranks)
    communicator.recv(tensor, (me - 1) % ranks)
    communicator.group_end()
    check(tensor, values[(me - 1) % ranks])
    communicator.suspend()
    communicator.resume()


def test_the_communicator_of_vllm_runs_on_it(machine: Machine) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        machine.start(vllm_communicator, rank, 2, port, SOFTWARE_GPU_COUNT="2") for rank in (0, 1)
    ]
    for child in ranks:
        children.finished(child)


def different_calls(rank: str, size: str, file: str, kind: str) -> None:
    """The ranks' calls differ in one thing; the communicator says so and fails on both."""
    import torch
    import torch.distributed as dist

    me, _ = join(rank, size, file)
    count = COUNT + (me if kind in ("count", "message") else 0)
    dtype = torch.float64 if kind == "type" and me else torch.float32
    tensor = torch.zeros(count, dtype=dtype).cuda()
    calls: dict[str, Callable[[], object]] = {
        "message": lambda: dist.recv(tensor, src=0) if me else dist.send(tensor, dst=1),
        "function": lambda: dist.broadcast(tensor, src=0) if me else dist.all_reduce(tensor),
        "root": lambda: dist.broadcast(tensor, src=me),
    }
    with pytest.raises(dist.DistBackendError, match="MISMATCH"):
        calls.get(kind, lambda: dist.all_reduce(tensor))()


@pytest.mark.parametrize("kind", ["count", "type", "function", "root", "message"])
def test_calls_that_differ_between_ranks_fail_on_both(machine: Machine, kind: str) -> None:
    for output in machine.ranks(different_calls, 2, kind):
        assert "[software GPU]" in output
        assert "NCCL MISMATCH: rank " in output


def abandon(rank: str, size: str, file: str) -> None:
    """Rank 1 ends before the collective; rank 0 waits until a watchdog ends it."""
    import torch
    import torch.distributed as dist

    me, _ = join(rank, size, file)
    if me == 1:
        os._exit(0)
    watchdog = threading.Timer(65, os._exit, [0])
    watchdog.start()
    dist.all_reduce(torch.zeros(3).cuda())


def test_a_rank_that_waits_for_a_minute_names_the_missing_one(machine: Machine) -> None:
    first, second = machine.ranks(abandon, 2)
    assert "NCCL WAITS: rank 0 of 2 has waited 60 s in all_reduce" in first
    assert re.search(r"for rank 1 \(pid \d+, ended\)", first)
    assert "WAITS" not in second


if __name__ == "__main__":
    children.main(globals())
