"""The 95 % interval of a mean over prompts, and spikes of a gradient norm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: z of a two-sided 95 % interval.
Z95 = 1.959964
#: A spike is a norm above this multiple of the median of the norms before it. Ours; neither paper
#: defines one.
SPIKE_FACTOR = 3.0
SPIKE_WINDOW = 20


def half_width(values: Sequence[float]) -> float:
    """z s / sqrt(n) of the normal 95 % interval of a mean; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return Z95 * math.sqrt(variance / len(values))


def spikes(norms: Sequence[float]) -> list[int]:
    """Indices of norms above ``SPIKE_FACTOR`` times the median of ``SPIKE_WINDOW`` before them."""
    return [
        i
        for i in range(5, len(norms))
        if norms[i] > SPIKE_FACTOR * statistics.median(norms[max(0, i - SPIKE_WINDOW) : i])
    ]
