"""The weight curve as a picture."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from sg_rlhf.common import figures
from sg_rlhf.config import ConfigError
from sg_rlhf.weights.describe import RecipeLoss

CURVE_POINTS = 501


def curve(rule: RecipeLoss, probs: list[float]) -> list[float]:
    """w at each p, in float64."""
    return rule.weights([math.log(p) if p else -math.inf for p in probs])


def check_curve(rule: RecipeLoss) -> None:
    """Raise ``ConfigError`` for a weighting that is not a function of p alone."""
    if rule.weighting is not None and not rule.is_curve():
        raise ConfigError(
            f"sg.weighting.type={rule.weighting.name}: not a function of p alone, so --plot has no "
            "curve to draw; leave --plot out"
        )


def plot(rule: RecipeLoss, path: Path) -> None:
    """Plot the weight curve with its bounds, mean and dead zones to ``path``."""
    import torch
    from matplotlib.figure import Figure

    cfg = rule.weighting
    probs = [i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    if cfg is not None:
        before = cfg.before_clip(torch.tensor(probs, dtype=torch.float64))
        if before is not None:
            label = cfg.before_clip_label
            axes.plot(probs, before.tolist(), color="0.6", lw=1.2, ls=":", label=label)
        for label, level in cfg.levels().items():
            axes.axhline(level, color="0.75", lw=0.8)
            axes.annotate(label, (1.01, level), va="center", annotation_clip=False)
    weights = curve(rule, probs)
    axes.plot(probs, weights, color="tab:blue", lw=2.4, label="weight w(p)")
    mean = rule.mean()
    if mean is not None and max(weights) > min(weights):
        shown = f"mean over uniform p = {mean:.4g}"
        axes.axhline(mean, color="tab:green", lw=1, ls="-.", label=shown)
    for dead in rule.dead_zones():
        color = "tab:red" if dead.positive else "tab:orange"
        assert dead.zone is not None  # `check_curve`
        first, last = dead.zone
        shade = f"dead zone for A {'>' if dead.positive else '<'} 0: {first:.3g} < p < {last:.3g}"
        axes.axvspan(first, last, color=color, alpha=0.14, lw=0, label=shade)
        axes.axhline(dead.level, color=color, lw=1, ls="--", label=f"{dead.name} = {dead.level:g}")
    axes.set(xlim=(0, 1), xlabel="token probability p", ylabel="weight w")
    name, _, rest = rule.describe().partition(": ")
    axes.set_title(f"{name}\n{textwrap.fill(rest, 96)}", fontsize=10)
    if max(weights) > min(weights):
        axes.margins(y=0.12)
    else:  # otherwise the axis would magnify rounding
        axes.set_ylim(0, 2 * max(weights) or 1)
    axes.legend(loc="best", fontsize=8.5, framealpha=0.95)
    path.parent.mkdir(parents=True, exist_ok=True)
    figures.save(figure, path, dpi=150)
