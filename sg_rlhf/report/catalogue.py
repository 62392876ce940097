"""Every figure of the report, in the order of the page: name, title, how to read it.

To add a figure of lines, add an entry with :func:`figures.lines`. Any other figure is a function
that raises :class:`chart.Missing` where the runs do not have its data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sg_rlhf.common.statistics import SPIKE_FACTOR, SPIKE_WINDOW
from sg_rlhf.report import figures, stacked_figures, token_probabilities
from sg_rlhf.report.chart import Chart, Missing
from sg_rlhf.report.figures import Line, lines
from sg_rlhf.report.runs import Group


@dataclass(frozen=True)
class Entry:
    """One figure.

    Attributes:
        key: its id in the page and its file name.
        reading: what is drawn and how to read it, for the page.
    """

    key: str
    title: str
    reading: str
    chart: Callable[[list[Group]], Chart]


FIGURES = (
    Entry(
        "reward", "Training reward",
        "Mean reward of the responses of each rollout, as the paper's Figure 2. Thin: every "
        "rollout, or every seed; thick: its running mean.",
        lines(figures.REWARD, missing="No rollout has a mean reward."),
    ),
    Entry(
        "grad_norm", "Gradient norm",
        "L2 norm before clipping, of every optimizer step rather than one per rollout; as the "
        f"paper's Figure 1. A ringed point is a spike: above {SPIKE_FACTOR:g} times the "
        f"median of the {SPIKE_WINDOW} steps before it.",
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
        "entropy", "Entropy",
        "Mean entropy of the policy's next-token distribution on its own responses.",
        lines(
            Line("entropy_loss", "entropy (nats per token)", steps=True, scale="zero"),
            missing="The runs log no entropy (actor.entropy_coef=0.0 logs it).",
        ),
    ),
    Entry(
        "kl", "KL to the reference",
        "The KL term of the loss, by each run's own estimator (algo.kl.estimator): runs with "
        "different estimators cannot be compared here.",
        lines(
            Line("kl", "KL estimate (nats per token)", steps=True),
            missing="The runs log no KL to a reference model (algo.kl.init_coef is 0).",
        ),
    ),
    Entry(
        "length", "Response length",
        "Mean tokens of a response, and the share of responses that reached the limit.",
        lines(
            Line("rollout/response_length_mean", "tokens", scale="zero"),
            Line("rollout/truncated_rate", "share cut", scale="share"),
            missing="The runs log no response length.",
        ),
    ),
    Entry(
        "mismatch", "Engine and trainer",
        "The tokens were sampled by the rollout engine, and are trained on by another program. "
        "Above: KL(engine || trainer) over the tokens of each rollout (k3). Below: the largest "
        "difference of a token's log-prob. Both rise before a run collapses for this reason; "
        "sg.correction is the remedy.",
        lines(
            Line("sg/mismatch_kl_k3", "KL(engine || trainer)", scale="log", smooth=False),
            Line("sg/mismatch_max", "largest difference", scale="log", smooth=False),
            needs="sg/n_mismatch_tokens",
            missing="The runs log no log-probs of the engine.",
        ),
    ),
    Entry(
        "weight_curve", "Token weight over probability",
        "Above: the weight w(p) that config.yaml describes. In a dead zone a token has no policy "
        "gradient even on-policy, at ratio 1. Below: how probable the run's tokens were.",
        figures.weight_curve,
    ),
    Entry(
        "weights", "Token weights in training",
        "Mean weight over the tokens of each rollout; for one seed also the 5 % to 95 % range. A "
        "mean above 1 lengthens the gradient; AdamW cancels a constant factor of it: see "
        "docs/method.md on scale.",
        lines(
            Line(
                "sg/weight_mean", "weight w", steps=True, scale="zero",
                band=("sg/weight_q05", "sg/weight_q95"),
            ),
            missing="The runs log no token weights.",
        ),
    ),
    Entry(
        "zeroed", "Tokens without a policy gradient",
        "Share of the tokens with positive advantage that the clip zeroes: in the optimizer "
        "step, and at ratio 1.",
        lines(
            Line("sg/zeroed_pos", "in the step", steps=True, scale="share"),
            Line("sg/zeroed_pos_at_ratio1", "at ratio 1", steps=True, scale="share"),
            missing="The runs do not log which tokens have no policy gradient.",
        ),
    ),
    Entry(
        "stabilising_factor", "Factor w (1 - p)",
        "The factor that bounds a token's gradient in Theorems 3.5 and 3.6 of the paper. A smaller "
        "bound is not a smaller gradient.",
        lines(
            Line("sg/w_one_minus_p_mean", "mean of w (1 - p)", steps=True, scale="zero"),
            missing="The runs do not log w (1 - p).",
        ),
    ),
    Entry(
        "token_probabilities", "Likely and unlikely tokens",
        "Mean probability p of the tokens in samples.jsonl, over all rollouts, as the paper's "
        f"Figure 3: the {token_probabilities.SHOWN} least and the {token_probabilities.SHOWN} most "
        f"probable of those that occur {token_probabilities.LEAST} times, and their number. "
        "␣ is a space, ↵ a line end, ⇥ a tab.",
        token_probabilities.chart,
    ),
    Entry(
        "accuracy_by_set", "Accuracy of each set and source",
        "Held-out sets of sg.eval_sets and data sources (the size of a puzzle, as the paper's "
        "Figure 4) along training. The distance between training prompts and held-out prompts of "
        "the same kind is the generalisation gap. Bars: 95 % interval over prompts, or the "
        "range of the seeds.",
        figures.accuracy_by_set,
    ),
    Entry(
        "staleness", "Age of the tokens",
        "Of an asynchronous run. Age: weight syncs between a token's sampling and its update.",
        stacked_figures.staleness,
    ),
    Entry(
        "seconds_per_rollout", "Seconds of each rollout",
        "Wall clock from one rollout's row to the next, by part; several seeds are their mean. "
        "Longest response: from when 90 % of the prompts were finished until all were. "
        "A first rollout that would flatten the others is cut; its seconds are above it. "
        "docs/performance.md says which settings change a part.",
        stacked_figures.seconds_per_rollout,
    ),
)  # fmt: skip


def write(
    make: Callable[[list[Group]], Chart], groups: list[Group], path: Path, title: str = ""
) -> bool:
    """One figure as a file; False where the runs do not hold its data."""
    from sg_rlhf.report import drawing  # matplotlib: only where it draws

    try:
        chart = make(groups)
    except Missing:
        return False
    drawing.save(drawing.draw(chart, title), path)
    return True


def write_all(groups: list[Group], folder: Path, formats: tuple[str, ...]) -> list[Path]:
    """Every figure as files in ``folder``; returns those written, and skips what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [(entry, folder / f"{entry.key}.{ending}") for entry in FIGURES for ending in formats]
    return [path for entry, path in paths if write(entry.chart, groups, path)]
