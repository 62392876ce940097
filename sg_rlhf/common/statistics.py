"""The interval that a mean over prompts is printed with."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: z of a two-sided 95 % interval.
Z95 = 1.959964


def half_width(values: Sequence[float]) -> float:
    """Half of the normal 95 % interval of a mean over prompts; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return Z95 * math.sqrt(variance / len(values))
