"""Measurements of an update: seconds of its passes, and memory.

Forward and backward passes are measured without waiting for the device in between. The memory
metrics, each the largest of all ranks:

- ``memory/peak_allocated_gib``: the most that torch had allocated in the policy's process.
- ``memory/device_used_gib``: memory of the GPU in use by all processes at the end of the update.
  The allocator still has its cache then, so this is about the peak.
- ``memory/peak_rss_gib``, without CUDA: the process's largest resident size so far.
"""

from __future__ import annotations

import resource
import time

import torch

from sg_rlhf.overlay.checkpoints.strategy import Strategy

GIB = 2**30
#: On the device, or in seconds on the host without CUDA.
PointInTime = torch.cuda.Event | float


def reset_peak() -> None:
    """Start a new peak, before an update."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def current_usage() -> dict[str, float]:
    """The metrics of this rank."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    free, total = torch.cuda.mem_get_info()
    return {
        "memory/peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/device_used_gib": (total - free) / GIB,
    }


def max_over_ranks(strategy: Strategy) -> dict[str, float]:
    """The largest of all ranks; every rank must call it."""
    largest: dict[str, float] = strategy.all_reduce(current_usage(), op="max")
    return largest


def now() -> PointInTime:
    """The present."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds(start: PointInTime, end: PointInTime) -> float:
    """Seconds between two points; on CUDA ``end`` must be past, or the host waits for it."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
