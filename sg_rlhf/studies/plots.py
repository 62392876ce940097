"""The picture of a study: every variant beside the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sg_rlhf.common import figures
from sg_rlhf.studies.plan import Study
from sg_rlhf.studies.results import geometric_mean, interval

#: Colour of a mean and its interval.
RING = "#222222"


def plot_differences(study: Study, rows: list[dict[str, Any]], path: Path) -> None:
    """Each variant beside the baseline, paired: held-out accuracy, and the peak of the norm.

    A dot is a regime and a seed. A ring is the mean over the seeds where a variant was run in one
    regime, and else that over the regimes' means (`study_results.over_regimes`), with its interval.
    """
    paired = [row for row in rows if "held_out_after_difference" in row]
    variants = list(dict.fromkeys(row["variant"] for row in paired))[::-1]
    regimes = [name for name in study.file.regimes if any(r["regime"] == name for r in paired)]
    figure = Figure(figsize=(9, 1.3 + 0.3 * len(variants)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, key, title in (
        (left, "held_out_after_difference", "held-out accuracy"),
        (right, "grad_norm_peak_ratio", "largest gradient norm / median"),
    ):
        for position, variant in enumerate(variants):
            of_variant = [row for row in paired if row["variant"] == variant]
            for row in of_variant:
                values = row[key]["values"]
                color = f"C{regimes.index(row['regime'])}"
                axes.plot(values, [position] * len(values), ".", color=color, ms=7, alpha=0.8)
            sample = of_variant[0][key]["values"]
            if len(of_variant) > 1:
                sample = [row[key]["mean"] for row in of_variant]
            _mean_and_interval(axes, position, sample, logarithmic=axes is right)
        axes.axvline(1.0 if axes is right else 0.0, color="#888888", lw=0.8, ls="--")
        _frame(axes, f"{title}, beside {study.file.baseline}")
    left.set_yticks(range(len(variants)), variants)
    left.set_ylim(-0.6, len(variants) - 0.4)
    left.set_xlabel("difference")
    right.set_xlabel("ratio")
    _logarithmic(right)
    # An interval of a few pairs would take all the room there is.
    ratios = [value for row in paired for value in row["grad_norm_peak_ratio"]["values"]]
    right.set_xlim(min(ratios) / 1.5, max(ratios) * 1.5)
    for index, regime in enumerate(regimes):
        left.plot([], [], ".", color=f"C{index}", ms=7, label=regime)
    figure.legend(loc="outside lower center", ncols=len(regimes), frameon=False, fontsize=9)
    figures.save(figure, path, dpi=130)


def _frame(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(True, axis="x", color="#e3e6ea")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _logarithmic(axes: Any) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _mean_and_interval(
    axes: Any, position: int, values: Sequence[float], *, logarithmic: bool
) -> None:
    """Draw a ring at the mean (the geometric one on a logarithmic axis), and its interval."""
    if logarithmic:
        mean, low, high = geometric_mean(values)
    else:
        mean, half = statistics.fmean(values), interval(values)
        low, high = mean - half, mean + half
    axes.plot(mean, position, "o", mfc="none", mec=RING, ms=8)
    if not math.isnan(low):
        axes.errorbar(mean, position, xerr=[[mean - low], [high - mean]], color=RING, capsize=3)
