"""The 95 % interval of a mean over prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: z of a two-sided 95 % interval.
Z95 = 1.959964


def half_width(values: Sequence[float]) -> float:
    """Half width of the normal 95 % interval of a mean; 0 for fewer than two values.

    z s / sqrt(n), with the sample standard deviation s.
    """
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return Z95 * math.sqrt(variance / len(values))
