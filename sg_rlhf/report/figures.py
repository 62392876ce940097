"""The two figures that a run ends with: reward and accuracy, gradient norm of every step."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREY = "#1f5fa8", "#d1601f", "#8a8f98"
#: A spike is a norm above this multiple of the running median (method.md).
SPIKE_FACTOR = 3.0
MEDIAN_WINDOW = 20


def spikes(norms: list[float], window: int = MEDIAN_WINDOW) -> list[int]:
    """Indices of norms above ``SPIKE_FACTOR`` times the median of the ``window`` before them."""
    return [
        i
        for i in range(5, len(norms))
        if norms[i] > SPIKE_FACTOR * statistics.median(norms[max(0, i - window) : i])
    ]


def _style(axes: Axes, title: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _smooth(values: list[float], window: int) -> list[float]:
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def reward_figure(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path, name: str
) -> None:
    """Mean reward of each rollout above, held-out accuracy with 95 % intervals below."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 6), sharex=True, layout="constrained")
    steps = [row["global_step"] for row in metrics]
    rewards = [row["rollout/reward_mean"] for row in metrics]
    top.plot(steps, rewards, color=BLUE, alpha=0.3, linewidth=1, label="each rollout")
    top.plot(steps, _smooth(rewards, 5), color=BLUE, linewidth=2, label="mean of 5 rollouts")
    _style(top, f"{name}: training reward", "mean reward")
    top.legend(frameon=False, loc="lower right")
    if all("rollout/accuracy" in row for row in metrics):
        accuracy = _smooth([row["rollout/accuracy"] for row in metrics], 5)
        bottom.plot(
            steps, accuracy, color=GREY, linewidth=1.5, label="training prompts (mean of 5)"
        )
    held_out = [row for row in evaluations if "eval_accuracy" in row]
    bottom.errorbar(
        [row["global_step"] for row in held_out],
        [row["eval_accuracy"] for row in held_out],
        yerr=[row["eval_accuracy_ci95"] for row in held_out],
        color=ORANGE,
        marker="o",
        capsize=3,
        linewidth=2,
        label="held-out prompts, 95 % interval",
    )
    _style(bottom, "accuracy", "share correct")
    bottom.set_ylim(0, 1)
    bottom.set_xlabel("rollout")
    bottom.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def grad_norm_figure(rows: list[dict[str, Any]], path: Path, name: str) -> None:
    """Pre-clip gradient norm of every optimizer step, spikes marked."""
    norms = [row["grad_norm"] for row in rows]
    steps = [row["optimizer_step"] for row in rows]
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    axes.plot(steps, norms, color=BLUE, linewidth=1.2)
    marked = spikes(norms)
    if marked:
        axes.scatter(
            [steps[i] for i in marked],
            [norms[i] for i in marked],
            color=ORANGE,
            zorder=3,
            label=f"{len(marked)} spikes (> {SPIKE_FACTOR:g} x running median)",
        )
        axes.legend(frameon=False)
    if norms and max(norms) > 10 * statistics.median(norms):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _style(axes, f"{name}: gradient norm of every optimizer step, before clipping", "L2 norm")
    axes.set_xlabel("optimizer step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
