"""The figures of a training: one function per figure, from groups of runs to a matplotlib figure.

The same figures are in the page and in the files of ``--figures``. To add one: a function that
raises :class:`Missing` with a sentence where the runs do not hold its data, and an entry in
``catalogue.FIGURES``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import INK, MUTED, RC
from sg_rlhf.report.evaluations import Evaluated, held_out_accuracy, held_out_label
from sg_rlhf.report.runs import Curve, Group, Row, Run, curve, number, per_rollout
from sg_rlhf.report.text import drawn, one_line
from sg_rlhf.report.weighting import weighting_of
from sg_rlhf.tasks import registry

#: A spike is a norm above this multiple of the median of the norms before it. Ours; neither paper
#: defines one.
SPIKE_FACTOR = 3.0
MEDIAN_WINDOW = 20


class Missing(ValueError):
    """The runs do not hold what a figure shows; one sentence for the page."""


def spikes(norms: list[float]) -> list[int]:
    """Indices of norms above ``SPIKE_FACTOR`` times the median of ``MEDIAN_WINDOW`` before them."""
    return [
        i
        for i in range(5, len(norms))
        if norms[i] > SPIKE_FACTOR * statistics.median(norms[max(0, i - MEDIAN_WINDOW) : i])
    ]


def norm_curve(run: Run) -> Curve:
    """(optimizer step, gradient norm before clipping)."""
    return curve(run.steps, "actor_grad_norm", "optimizer_step")


def _curves(
    axes: Axes, groups: list[Group], key: str, *, steps: bool = False, window: int = 1
) -> bool:
    """A line per group for a key of metrics.jsonl, or the rollout means of optimizer_steps."""
    any_drawn = False
    for index, group in enumerate(groups):
        read = per_rollout if steps else curve
        found = [read(run.steps if steps else run.metrics, key) for run in group.runs]
        any_drawn |= drawing.draw_seeds(axes, found, index, drawn(group.label), window=window)
    return any_drawn


def _window(groups: list[Group]) -> int:
    return drawing.window_of(min(len(run.metrics) for group in groups for run in group.runs))


def _smoothing(window: int) -> str:
    return f"rollout (running mean of {window})" if window > 1 else "rollout"


def reward(groups: list[Group]) -> Figure:
    """Mean reward of each rollout (Figure 2 of the paper)."""
    figure, (axes,) = drawing.subplots()
    _reward(axes, groups)
    return figure


def accuracy(groups: list[Group]) -> Figure:
    """Held-out accuracy with its 95 % interval, and accuracy on the training prompts."""
    figure, (axes,) = drawing.subplots()
    _accuracy(axes, groups)
    return figure


def reward_and_accuracy(groups: list[Group]) -> Figure:
    """Both of the above in one figure: the picture that a run ends with."""
    figure, (top, bottom) = drawing.subplots(2, width=7.0, height=5.4, sharex=True)
    _reward(top, groups)
    top.set_xlabel("")
    with contextlib.suppress(Missing):
        _accuracy(bottom, groups)
    return figure


def _reward(axes: Axes, groups: list[Group]) -> None:
    window = _window(groups)
    if not _curves(axes, groups, "rollout/reward_mean", window=window):
        raise Missing("No rollout has a mean reward.")
    axes.set_ylabel("mean training reward")
    drawing.whole_numbers(axes, _smoothing(window))
    drawing.legend(axes)


def _accuracy(axes: Axes, groups: list[Group]) -> None:
    window = _window(groups)
    any_drawn = False
    labels = {held_out_label(run) for group in groups for run in group.runs}
    same = len(labels) == 1
    for index, group in enumerate(groups):
        color = drawing.color(index)
        for points in [curve(run.metrics, "rollout/accuracy") for run in group.runs]:
            values = drawing.smooth([y for _, y in points], window)
            axes.plot([x for x, _ in points], values, color=color, alpha=0.45, lw=0.9)
            any_drawn |= bool(points)
        evaluated = [held_out_accuracy(run) for run in group.runs]
        any_drawn |= draw_evaluated(axes, evaluated, index, drawn(_named(group, same)))
    if not any_drawn:
        raise Missing("There is neither a held-out evaluation nor accuracy on training prompts.")
    axes.set_ylim(0, 1)
    axes.set_ylabel("share correct")
    if same and any(labels):
        axes.set_title(f"held out: {drawn(labels.pop())}", loc="left", fontsize=8.5, color=MUTED)
    drawing.whole_numbers(axes)
    drawing.legend(axes)


def _named(group: Group, same: bool) -> str:
    """The group, and what its held-out accuracy is of where that is not the same everywhere."""
    sets = "" if same else held_out_label(group.runs[0])
    return f"{group.label}: {sets}" if sets else group.label


def draw_evaluated(axes: Axes, curves: list[list[Evaluated]], index: int, label: str) -> bool:
    """Points with their ``interval`` for one group; returns whether there were any."""
    if not any(curves):
        return False
    xs, ys, errors = interval(curves)
    axes.errorbar(
        xs, ys, yerr=errors, marker="o", ms=4, capsize=2.5, lw=1.7, color=drawing.color(index),
        ls=drawing.style(index), label=label,
    )  # fmt: skip
    return True


def interval(curves: list[list[Evaluated]]) -> tuple[list[float], list[float], list[list[float]]]:
    """(rollouts, accuracy, [below, above]): the interval of one run, or the range of the seeds."""
    curves = [points for points in curves if points]
    if len(curves) == 1:
        widths = [or_zero(point.half_width) for point in curves[0]]
        return (*_xy(accuracy_curve(curves[0])), [widths, widths])
    xs, ys, low, high = drawing.band([accuracy_curve(points) for points in curves])
    below = [y - a for y, a in zip(ys, low, strict=True)]
    return xs, ys, [below, [b - y for y, b in zip(ys, high, strict=True)]]


def accuracy_curve(points: list[Evaluated]) -> Curve:
    """(rollout, share correct)."""
    return [(float(point.step), point.accuracy) for point in points]


def or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def sources(evaluations: list[Row]) -> list[str]:
    """The data sources (or held-out sets) that the evaluations name, 2ppl before 10ppl."""
    found = {
        match[1]
        for row in evaluations
        for key in row
        if (match := re.fullmatch(r"eval_(.+)_accuracy", key))
    }
    return sorted(
        found, key=lambda s: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", s)]
    )


def source_name(source: str) -> str:
    """A data source as its domain calls it, also behind the name of a set; others as they are."""
    for pattern, title in _source_titles():
        match = re.fullmatch(rf"(?:(?P<set>.+)_)?(?P<source>{pattern})", source)
        if match:
            shown = re.sub(pattern, title, match["source"])
            return f"{one_line(match['set'])}: {shown}" if match["set"] else shown
    return one_line(source)


@functools.cache
def _source_titles() -> list[tuple[str, str]]:
    domains = registry.domains().values()
    return [pair for domain in domains for pair in domain.source_titles.items()]


def grad_norm(groups: list[Group]) -> Figure:
    """Gradient norm of every optimizer step before clipping, spikes marked (Figure 1)."""
    figure, (axes,) = drawing.subplots()
    norms: list[float] = []
    for index, group in enumerate(groups):
        curves = [points for run in group.runs if (points := norm_curve(run))]
        found = [[points[i] for i in spikes([y for _, y in points])] for points in curves]
        count = sum(map(len, found))
        drawing.draw_seeds(
            axes, curves, index, f"{drawn(group.label)}: {count} spike{'s' * (count != 1)}"
        )
        for points in filter(None, found):
            axes.scatter(
                [x for x, _ in points], [y for _, y in points], s=26, marker="v", zorder=4,
                facecolor=drawing.color(index), edgecolor=INK, linewidth=0.7,
            )  # fmt: skip
        norms += [y for points in curves for _, y in points]
    if not norms:
        raise Missing("optimizer_steps.jsonl has no gradient norm.")
    if max(norms) > 10 * statistics.median(norms) and min(norms) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("L2 norm before clipping")
    drawing.whole_numbers(axes, "optimizer step")
    drawing.legend(axes)
    return figure


def mismatch(groups: list[Group]) -> Figure:
    """KL of the rollout engine to the trainer, and the largest difference of a log-prob."""
    figure, (top, bottom) = drawing.subplots(2, height=5.0, sharex=True)
    counts = [row.get("sg/n_mismatch_tokens") for g in groups for r in g.runs for row in r.metrics]
    if not any(counts):
        raise Missing("The runs log no log-probs of the engine (sg.engine_log_probs).")
    for axes, key, label in (
        (top, "sg/mismatch_kl_k3", "KL(engine || trainer)"),
        (bottom, "sg/mismatch_max", "largest |difference| of log p"),
    ):
        _curves(axes, groups, key)
        values = [row[key] for g in groups for r in g.runs for row in r.metrics if key in row]
        if min(values) > 0:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
    top.set_xlabel("")
    drawing.whole_numbers(bottom)
    drawing.legend(top)
    return figure


def weights_over_training(groups: list[Group]) -> Figure:
    """Mean token weight, with its 5 % to 95 % quantiles for one seed."""
    figure, (axes,) = drawing.subplots()
    if not _curves(axes, groups, "sg/weight_mean", steps=True):
        raise Missing("The runs log no token weights.")
    for index, group in enumerate(groups):
        for run in group.runs if len(group.runs) == 1 else ():
            low, high = (dict(per_rollout(run.steps, f"sg/weight_{q}")) for q in ("q05", "q95"))
            xs = sorted(low.keys() & high.keys())
            axes.fill_between(
                xs, [low[x] for x in xs], [high[x] for x in xs], color=drawing.color(index),
                alpha=0.16, linewidth=0,
            )  # fmt: skip
    axes.set_ylabel("weight w, mean and 5-95 %")
    rules = [weighting_of(group.runs[0]).rule for group in groups]
    limits = [rule.limits() for rule in rules if rule is not None]
    if len(limits) == len(groups):
        # The attainable range, so that a weight that hardly moves looks like that.
        bottom, top = min(low for low, _ in limits), max(high for _, high in limits)
        margin = 0.08 * max(top - bottom, 0.1)
        axes.set_ylim(bottom - margin, top + margin)
    drawing.whole_numbers(axes)
    drawing.legend(axes)
    return figure


def zeroed(groups: list[Group]) -> Figure:
    """Tokens with A > 0 that have no policy gradient: in the step, and already at ratio 1."""
    figure, (axes,) = drawing.subplots()
    if not _curves(axes, groups, "sg/zeroed_pos", steps=True):
        raise Missing("The runs do not log which tokens have no policy gradient.")
    for index, group in enumerate(groups):
        for run in group.runs:
            points = per_rollout(run.steps, "sg/zeroed_pos_at_ratio1")
            axes.plot(*_xy(points), color=drawing.color(index), lw=1, ls=":")
    axes.plot([], [], color=MUTED, lw=1, ls=":", label="at ratio 1 (on-policy)")
    axes.set_ylim(0, max(0.05, axes.get_ylim()[1]))
    axes.set_ylabel("share of tokens with A > 0")
    drawing.whole_numbers(axes)
    drawing.legend(axes)
    return figure


def _xy(points: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _line(
    groups: list[Group], key: str, label: str, missing: str, *, from_zero: bool = False
) -> Figure:
    """The rollout means of a value of the optimizer steps, as a running mean."""
    figure, (axes,) = drawing.subplots()
    window = _window(groups)
    if not _curves(axes, groups, key, steps=True, window=window):
        raise Missing(missing)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    drawing.whole_numbers(axes, _smoothing(window))
    drawing.legend(axes)
    return figure


def stabilising_factor(groups: list[Group]) -> Figure:
    """Mean of w (1 - p), which bounds a token's gradient (Theorems 3.5 and 3.6)."""
    key, missing = "sg/w_one_minus_p_mean", "The runs do not log w (1 - p)."
    return _line(groups, key, "mean of w (1 - p)", missing, from_zero=True)


def entropy(groups: list[Group]) -> Figure:
    """Entropy of the policy, nats per token."""
    missing = "The runs log no entropy (actor.entropy_coef=0.0 logs it)."
    return _line(groups, "entropy_loss", "entropy (nats per token)", missing, from_zero=True)


def kl(groups: list[Group]) -> Figure:
    """The KL term to the reference model, as each run's own estimator gives it."""
    missing = "The runs log no KL to a reference model (algo.kl.init_coef is 0)."
    return _line(groups, "kl", "KL estimate (nats per token)", missing)


def quartiles(groups: list[Group]) -> Figure:
    """Share of the tokens, and of the summed absolute advantage, in four equal ranges of p."""
    figure, (axes,) = drawing.subplots()
    any_drawn, width = False, 0.8 / len(groups)
    for index, group in enumerate(groups):
        rows = [row for run in group.runs for row in run.steps]
        shares = [_token_mean(rows, f"sg/quartile{q}_token_share") for q in (1, 2, 3, 4)]
        masses = [_token_mean(rows, f"sg/quartile{q}_advantage_mass") for q in (1, 2, 3, 4)]
        if not all(map(math.isfinite, shares)):
            continue
        any_drawn = True
        xs = [q - 0.4 + (index + 0.5) * width for q in range(4)]
        axes.bar(xs, shares, width * 0.92, **drawing.fill(index), label=f"{drawn(group.label)}")
        if all(map(math.isfinite, masses)):
            axes.scatter(xs, masses, marker="D", s=22, color=INK, zorder=3)
    if not any_drawn:
        raise Missing("The runs do not log token shares by ranges of p (sg/quartile*).")
    axes.scatter([], [], marker="D", s=22, color=INK, label="share of summed |A|")
    axes.set_xticks(range(4), ["p < .25", ".25 - .5", ".5 - .75", "p > .75"])
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of tokens")
    drawing.legend(axes, "above")
    return figure


def _token_mean(rows: list[Row], key: str) -> float:
    """Mean over rows weighted by their tokens; NaN without any."""
    pairs = [(number(row, key), number(row, "sg/n_tokens")) for row in rows]
    pairs = [(v, n) for v, n in pairs if math.isfinite(v) and n > 0]
    total = math.fsum(n for _, n in pairs)
    return math.fsum(v * n for v, n in pairs) / total if total else math.nan


def length(groups: list[Group]) -> Figure:
    """Mean response length, and the share of responses that were cut."""
    figure, (top, bottom) = drawing.subplots(2, height=3.3, sharex=True)
    window = _window(groups)
    if not _curves(top, groups, "rollout/response_length_mean", window=window):
        raise Missing("The runs log no response length.")
    _curves(bottom, groups, "rollout/truncated_rate", window=window)
    top.set_ylim(bottom=0)
    top.set_ylabel("tokens")
    bottom.set_ylabel("share cut")
    bottom.set_ylim(0, max(0.05, bottom.get_ylim()[1]))
    drawing.whole_numbers(bottom, _smoothing(window))
    drawing.legend(top)
    return figure


def write(figure_of: Any, groups: list[Group], path: Path, title: str = "") -> bool:
    """One figure as a file; False where the runs do not hold its data."""
    with matplotlib.rc_context(RC):
        try:
            figure = figure_of(groups)
        except Missing:
            return False
        if title:
            figure.suptitle(drawn(title), x=0.02, ha="left", fontsize=10)
        drawing.save(figure, path)
    return True
