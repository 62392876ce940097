"""Time and memory of a device, and distances between tensors."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GIB = 2**30


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str) -> int:
    """Bytes that tensors hold on the device; 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def host_waits(call: Callable[[], object]) -> int:
    """How often the host waits for the GPU in a call."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of a call, and the bytes that it held at its peak beside what was there
    before; None where it ran out of memory."""

    milliseconds: float | None
    peak_bytes: int | None


def costs(
    calls: dict[str, Callable[[], object]], device: str, *, repeats: int, warm_up: int = 2
) -> dict[str, Cost]:
    """Of several calls that do the same, by turns, so that a slow moment hits all of them.

    What a call returns is dropped before the next. On CUDA by events; the peak is that of the
    first measured turn.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, int | None] = {}
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            if peaks.get(name, 0) is None:
                continue
            try:
                milliseconds, peak = _one(call, device)
            except torch.cuda.OutOfMemoryError:
                peaks[name] = None
                torch.cuda.empty_cache()
                continue
            if turn >= warm_up:
                times[name].append(milliseconds)
                peaks.setdefault(name, peak)
    return {
        name: Cost(statistics.median(times[name]) if times[name] else None, peaks.get(name))
        for name in calls
    }


def _one(call: Callable[[], object], device: str) -> tuple[float, int]:
    if device != "cuda":
        started = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - started), 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last), torch.cuda.max_memory_allocated() - before


def relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||, in float64 on the device of ``expected``."""
    expected = expected.detach().double()
    difference = found.detach().to(expected.device).double() - expected
    return float(difference.norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def largest(found: Tensor, expected: Tensor) -> float:
    """max |found - expected|; NaN where one of them is NaN."""
    if not expected.numel():
        return 0.0
    difference = found.detach().to(expected.device).double() - expected.detach().double()
    return float(difference.abs().max())
