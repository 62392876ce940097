"""The memory that an update took, for the run log; the plan's figures are beside it.

``memory/peak_allocated_gib``: what torch had allocated in the policy's process at most, of all
ranks the largest. ``memory/device_used_gib``: what of its GPU is taken by everybody when the update
ends, before the allocator gives its cache back, so about the peak of the GPU. Without CUDA
``memory/peak_rss_gib``: the process's largest resident size so far.
"""

from __future__ import annotations

import resource
from typing import Any

import torch

GIB = 2**30


def reset_peak() -> None:
    """Forget the peak before this update."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def current_usage() -> dict[str, float]:
    """The metrics of this rank."""
    if not torch.cuda.is_initialized():
        return {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    free, total = torch.cuda.mem_get_info()
    return {
        "memory/peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/device_used_gib": (total - free) / GIB,
    }


def max_over_ranks(strategy: Any) -> dict[str, float]:
    """The largest of all ranks; every rank must call it."""
    largest: dict[str, float] = strategy.all_reduce(current_usage(), op="max")
    return largest
