"""Two figures that benchmarks take of what they run: its peak memory, and how its time grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], object]) -> int:
    """Most bytes of CPU tensors at one time while ``action`` runs, beyond those before it.

    Counted allocation by allocation, so it is the same in every run and no other process matters.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size, by least squares over the three largest sizes.

    1 is linear. What a step costs however small it is makes the slope smaller, there the least.
    """
    x, y = ([math.log(v) for v in values[-3:]] for values in (sizes, seconds))
    return statistics.linear_regression(x, y).slope
