"""Seconds of forward and backward passes, measured without waiting for the device in between."""

from __future__ import annotations

import time
from typing import Any

import torch


def now() -> Any:
    """A point in time on the device, or on the host without CUDA."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    """Seconds between two points; on CUDA ``end`` must be past, or the host waits for it."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
