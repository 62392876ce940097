"""Every figure of the report, in the order of the page: name, title, how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from sg_rlhf.report import (
    accuracy_figures,
    drawing,
    figures,
    staleness_figures,
    timeline_figure,
    timing_figures,
    token_figures,
)
from sg_rlhf.report.runs import Group


@dataclass(frozen=True)
class Entry:
    """One figure.

    Attributes:
        key: its id in the page and its file name.
        reading: what is drawn and how to read it, for the page.
        letters: False where text must keep its exact width, so it is drawn.
        wide: takes the whole width of the page.
        remarks: sentences of the runs' own that follow in the page, if any.
    """

    key: str
    title: str
    reading: str
    draw: Callable[[list[Group]], Figure]
    letters: bool = True
    wide: bool = False
    remarks: Callable[[list[Group]], list[str]] | None = None


FIGURES = (
    Entry(
        "reward", "Training reward",
        "Mean reward of the responses of each rollout, as the paper's Figure 2. Thin: every "
        "rollout, or every seed; thick: its running mean.",
        figures.reward,
    ),
    Entry(
        "grad_norm", "Gradient norm",
        "L2 norm before clipping, of every optimizer step rather than one per rollout; as the "
        f"paper's Figure 1. A triangle is a spike: above {figures.SPIKE_FACTOR:g} times the "
        f"median of the {figures.MEDIAN_WINDOW} steps before it.",
        figures.grad_norm,
    ),
    Entry(
        "accuracy", "Accuracy",
        "Points: held-out accuracy, without evaluation sets that are training data. Bars: the 95 % "
        "interval over prompts, or, for several seeds, lowest and highest seed. Thin: accuracy on "
        "the training prompts in the rollouts.",
        figures.accuracy,
    ),
    Entry(
        "mismatch", "Engine and trainer",
        "The tokens were sampled by the rollout engine, and are trained on by another program. "
        "Above: KL(engine || trainer) over the tokens of each rollout (k3). Below: the largest "
        "difference of a token's log-prob. Both rise before a run collapses for this reason; "
        "sg.correction is the remedy.",
        figures.mismatch,
    ),
    Entry(
        "staleness", "Age of the tokens",
        "Of an asynchronous run. Age: weight syncs between a token's sampling and its update. "
        "Dropped: sampled, but too old to train on.",
        staleness_figures.staleness,
    ),
    Entry(
        "accuracy_by_set", "Accuracy of each evaluation set",
        "The sets of sg.eval_sets along training. The distance between the training prompts and "
        "held-out prompts of the same kind is the generalisation gap. Bars: 95 % interval over "
        "prompts; band: the range of the seeds.",
        accuracy_figures.accuracy_by_set, wide=True,
    ),
    Entry(
        "accuracy_by_source", "Accuracy by source",
        "Last held-out evaluation by the rows' data source (the size of a puzzle), as the paper's "
        "Figure 4; the line across a bar is the first "
        "evaluation. Error bars: 95 % interval over prompts, or the range of the seeds.",
        accuracy_figures.accuracy_by_source,
    ),
    Entry(
        "weight_curve", "Token weight over probability",
        "Above: the weight w(p) that config.yaml describes. In a dead zone a token has no policy "
        "gradient even on-policy, at ratio 1. Below: how probable the run's tokens were.",
        token_figures.weight_curve,
    ),
    Entry(
        "weights", "Token weights in training",
        "Mean weight over the tokens of each rollout. A mean above 1 lengthens the "
        "gradient; AdamW cancels a constant factor of it: see docs/method.md on scale.",
        figures.weights_over_training,
    ),
    Entry(
        "zeroed", "Tokens without a policy gradient",
        "Share of the tokens with positive advantage that the clip zeroes: in the optimizer "
        "step, and at ratio 1.",
        figures.zeroed,
    ),
    Entry(
        "stabilising_factor", "Factor w (1 - p)",
        "The factor that bounds a token's gradient in Theorems 3.5 and 3.6 of the paper; smaller "
        "means steadier updates.",
        figures.stabilising_factor,
    ),
    Entry(
        "by_position", "Tokens by their position",
        "Of the samples' tokens, by their place in the response: the mean of 1 - p, of the entropy "
        "and of the absolute difference of trainer's and engine's log-prob. A difference that "
        "grows along the response is one that a long response multiplies.",
        token_figures.by_position,
    ),
    Entry(
        "quartiles", "Tokens and advantage by probability",
        "Bars: where the tokens are. Diamonds: where the summed absolute advantage is.",
        figures.quartiles,
    ),
    Entry(
        "entropy", "Entropy",
        "Mean entropy of the policy's next-token distribution on its own responses.",
        figures.entropy,
    ),
    Entry(
        "kl", "KL to the reference",
        "The KL term of the loss, by each run's own estimator (algo.kl.estimator): runs with "
        "different estimators cannot be compared here.",
        figures.kl,
    ),
    Entry(
        "length", "Response length",
        "Mean tokens of a response, and the share of responses that reached the limit.",
        figures.length,
    ),
    Entry(
        "seconds_per_rollout", "Seconds of each rollout",
        "Wall clock from one rollout's row to the next, by part; several seeds are their mean. One "
        "colour is one phase. Longest response: from when 90 % of the prompts were finished until "
        "all were.",
        timing_figures.seconds_per_rollout, wide=True, remarks=timing_figures.what_to_change,
    ),
    Entry(
        "timeline", "Timeline of the latest rollouts",
        "When each kind of process worked, from the seconds of each section: they follow one "
        "another. An empty stretch of a lane is waiting. In an asynchronous run the engines also "
        "generate during the update; generation is then the controller's waiting for them.",
        timeline_figure.timeline, wide=True,
    ),
    Entry(
        "word_clouds", "Likely and unlikely tokens",
        "Frequent tokens of the samples by their mean probability, as the paper's Figure 3; "
        "larger means more often sampled. The two colours in a cloud only set words apart.",
        token_figures.word_clouds, letters=False, wide=True,
    ),
)  # fmt: skip


def draw(entry: Entry, groups: list[Group]) -> Figure:
    """The figure of an entry in the report's style.

    Raises:
        Missing: the runs do not hold its data.
    """
    with matplotlib.rc_context(drawing.RC):
        return entry.draw(groups)


def write_all(groups: list[Group], folder: Path, formats: tuple[str, ...]) -> list[Path]:
    """Every figure as files in ``folder``; returns those written, and skips what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for entry in FIGURES:
        for ending in formats:
            path = folder / f"{entry.key}.{ending}"
            if figures.write(entry.draw, groups, path):
                written.append(path)
    return written
