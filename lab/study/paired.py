"""Statistics of a preregistered study: contrasts of two arms, paired by start model and seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats

#: (start model, seed) -> a figure of the run
Values = Mapping[tuple[str, int], float]


class Contrast(NamedTuple):
    """Mean of paired differences, its 95 % interval, p of the paired t test and of Welch's."""

    n: int
    mean: float
    sd: float
    low: float
    high: float
    p: float
    welch: float


def differences(treated: Values, baseline: Values) -> dict[tuple[str, int], float]:
    """Treated minus baseline, for each (start, seed) that both have."""
    return {key: treated[key] - baseline[key] for key in sorted(treated.keys() & baseline.keys())}


def contrast(treated: Values, baseline: Values) -> Contrast:
    """Paired by start and seed, two-sided."""
    pairs = [*differences(treated, baseline).values()]
    found = stats.ttest_1samp(pairs, 0.0)
    low, high = found.confidence_interval(0.95)
    arms = (
        [values[key] for key in differences(treated, baseline)] for values in (treated, baseline)
    )
    welch = stats.ttest_ind(*arms, equal_var=False).pvalue
    mean, sd = statistics.fmean(pairs), statistics.stdev(pairs)
    return Contrast(
        len(pairs), mean, sd, float(low), float(high), float(found.pvalue), float(welch)
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in the given order (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[i])
        adjusted[i] = min(1.0, largest)
    return adjusted


def tost(pairs: Sequence[float], margin: float) -> float:
    """p of "the mean is outside +-margin": the larger of two one-sided tests (Schuirmann 1987)."""
    above = stats.ttest_1samp(pairs, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(pairs, margin, alternative="less").pvalue
    return float(max(above, below))


def start_by_arm(pairs: Values) -> float:
    """p of "the difference is the same for every start": one-way analysis of variance.

    NaN for a single start.
    """
    starts = sorted({start for start, _ in pairs})
    if len(starts) < 2:
        return math.nan
    groups = [[value for (start, _), value in pairs.items() if start == s] for s in starts]
    return float(stats.f_oneway(*groups).pvalue)
