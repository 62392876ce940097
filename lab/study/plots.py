"""The picture of a study: every variant compared with the baseline."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from lab.study.plan import Study
from lab.study.results import PEAK_RATIO, geometric_mean, interval, main_accuracy
from sg_rlhf.common import figures

#: Colour of a mean and its interval.
RING = "#222222"


def plot_differences(study: Study, rows: list[dict[str, Any]], path: Path) -> None:
    """Each variant compared with the baseline, paired: accuracy, and the peak of the norm.

    A dot is a regime and a seed. A ring is the mean over the seeds where a variant was run in one
    regime, else over the regimes' means, with its interval.
    """
    main = main_accuracy(rows)
    paired = [row for row in rows if "difference" in row.get(main, {})]
    variants = list(dict.fromkeys(row["variant"] for row in paired))[::-1]
    regimes = [name for name in study.file.regimes if any(r["regime"] == name for r in paired)]
    figure = Figure(figsize=(9, 1.3 + 0.3 * len(variants)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for row in paired:
        y, color = variants.index(row["variant"]), f"C{regimes.index(row['regime'])}"
        for axes, entry in ((left, row[main]["difference"]), (right, row.get(PEAK_RATIO, {}))):
            values = entry.get("values", [])
            axes.plot(values, [y] * len(values), ".", color=color, ms=7, alpha=0.8)
    for y, variant in enumerate(variants):
        of_variant = [row for row in paired if row["variant"] == variant]
        differences = [row[main]["difference"] for row in of_variant]
        ratios = [row[PEAK_RATIO] for row in of_variant if PEAK_RATIO in row]
        sample = _sample(differences)
        mean, half = statistics.fmean(sample), interval(sample)
        _ring(left, y, mean, mean - half, mean + half)
        if ratios:
            _ring(right, y, *geometric_mean(_sample(ratios)))
    of_set = main.removesuffix("_after")
    for axes, title, neutral in (
        (left, f"{of_set} accuracy: difference to", 0.0),
        (right, "largest gradient norm / median: ratio to", 1.0),
    ):
        axes.axvline(neutral, color="#888888", lw=0.8, ls="--")
        axes.set_title(f"{title} {study.file.baseline}", loc="left", fontsize=10)
        axes.grid(True, axis="x", color="#e3e6ea")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yticks(range(len(variants)), variants)
    left.set_ylim(-0.6, len(variants) - 0.4)
    right.set_xscale("log")
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter(NullFormatter())
    # An interval of a few pairs would take all the room there is.
    values = [value for row in paired if PEAK_RATIO in row for value in row[PEAK_RATIO]["values"]]
    right.set_xlim(min(values) / 1.5, max(values) * 1.5)
    for index, regime in enumerate(regimes):
        left.plot([], [], ".", color=f"C{index}", ms=7, label=regime)
    figure.legend(loc="outside lower center", ncols=len(regimes), frameon=False, fontsize=9)
    figures.save(figure, path, dpi=130)


def _sample(of_regimes: list[dict[str, Any]]) -> list[float]:
    """The seeds of one regime, or the means of several."""
    if len(of_regimes) == 1:
        return list(of_regimes[0]["values"])
    return [entry["mean"] for entry in of_regimes]


def _ring(axes: Any, y: int, mean: float, low: float, high: float) -> None:
    axes.plot(mean, y, "o", mfc="none", mec=RING, ms=8)
    if not math.isnan(low):
        axes.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color=RING, capsize=3)
