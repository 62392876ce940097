"""Seconds of forward and backward passes, measured without waiting for the device in between."""

from __future__ import annotations

import time

import torch

#: On the device, or in seconds on the host without CUDA.
PointInTime = torch.cuda.Event | float


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
