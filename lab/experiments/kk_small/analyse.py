"""Print the tables of this study from its committed runs (results.jsonl.gz), in Markdown.

    python lab/experiments/kk_small/analyse.py

The tables are on docs/results.md and on README.md of this folder;
``tests/unit/docs/test_figures.py`` checks both pages. results.md of this folder is written by
``python -m lab.study --table`` and has the figures of every variant.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import optimize, stats

from lab.study.plan import Cell, load_study
from lab.study.results import read_record
from sg_rlhf.weights.describe import RecipeLoss

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SEEDS = (0, 1, 2)
#: `sg_quotient` and `tau_0.5` have the weight 1 for every token: GRPO under two more names.
GRPO = ("grpo", "sg_quotient", "tau_0.5")
#: Forms of GRPO-SG whose clip leaves every token a gradient at ratio 1.
NO_DEAD_ZONE = ("sg_outside", "sg_normalized", "sg_inside_u1.2")
FORMS = ("sg_inside", "sg_outside", "sg_normalized")
REGIMES = (
    "base",
    "off_policy",
    "high_lr",
    "no_dual_clip",
    "high_entropy",
    "off_policy_high_lr",
    "long",
)
MAX_NORM = 1.0  # actor.max_norm of configs/base.yaml


STUDY = load_study(HERE / "study.yaml")
RUNS = {cell: run for cell in STUDY.cells() if (run := read_record(HERE).get(cell.name))}
#: (regime, variant, seed) -> the run.
CELLS = {(cell.regime, cell.variant, cell.seed): run for cell, run in RUNS.items()}
#: Accuracy that the papers print for the same variants: Qwen2.5-3B-Instruct, 3 to 7 people.
PUBLISHED = {
    "Table 7: tau at (L, U) = (1.0, 1.4)": {
        "tau_0.5": 0.39, "tau_2": 0.40, "tau_7": 0.46, "sg_inside": 0.63, "tau_10": 0.62,
        "tau_20": 0.55,
    },
    "Table 7: (L, U) at tau 9": {
        "sg_inside_u1.2": 0.62, "sg_inside": 0.63, "range_0.8_1.5": 0.62, "range_0.5_1.5": 0.60,
    },
    "TR-GRPO's Table 4: other weightings": {
        "grpo": 0.39, "random": 0.41, "reverse": 0.39, "sg_inside": 0.63,
    },
}  # fmt: skip
TABLE_7 = dict.fromkeys(variant for ranking in list(PUBLISHED.values())[:2] for variant in ranking)


def dead_zone_begins(variant: str) -> float | None:
    """The p from which a token with A > 0 has no policy gradient at ratio 1; None where none."""
    config = STUDY.config(Cell("base", variant, 0), Path("data"))
    for dead in RecipeLoss.of(config, allow_constant=True).dead_zones():
        if dead.positive and dead.zone:
            return round(dead.zone[0], 4)
    return None


def figures(regime: str, variant: str, name: str) -> np.ndarray:
    """A figure of the three seeds."""
    return np.array([CELLS[regime, variant, seed]["figures"][name] for seed in SEEDS])


def held_out(regime: str, variant: str) -> np.ndarray:
    return figures(regime, variant, "held_out_after")


def has(regime: str, variant: str) -> bool:
    return (regime, variant, 0) in CELLS


def variants(regime: str) -> list[str]:
    return list(dict.fromkeys(v for r, v, _ in CELLS if r == regime))


def mean_and_half_width(values: np.ndarray) -> tuple[float, float]:
    """Mean and half of its 95 % t-interval."""
    n = len(values)
    return float(values.mean()), float(
        stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / math.sqrt(n)
    )


def short(value: float, digits: int = 3, sign: bool = False) -> str:
    """A number without the zero before its point."""
    return re.sub(r"\b0\.", ".", f"{value:{'+' if sign else ''}.{digits}f}")


def with_interval(values: np.ndarray, sign: bool = True) -> str:
    mean, half = mean_and_half_width(values)
    return f"{short(mean, sign=sign)} +- {short(half)}"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def grpo_runs() -> np.ndarray:
    """Held-out accuracy of the nine runs of `base` that are GRPO."""
    return np.concatenate([held_out("base", variant) for variant in GRPO])


def own_evaluations(chosen: Sequence[str], at: int) -> np.ndarray:
    """Held-out accuracy by the runs' own evaluation, before, after 10 or after 20 rollouts."""
    return np.array(
        [
            CELLS["base", variant, seed]["curves"]["accuracy"][at]["held_out"]
            for variant in chosen
            for seed in SEEDS
        ]
    )


def within_variants(regime: str) -> np.ndarray:
    """Each run's held-out accuracy minus its variant's mean, [variants, seeds]."""
    accuracy = np.array([held_out(regime, variant) for variant in variants(regime)])
    return accuracy - accuracy.mean(1, keepdims=True)


def pooled_sd(regime: str) -> tuple[float, int]:
    """The sd of a run within its variant, and its degrees of freedom."""
    residual = within_variants(regime)
    df = residual.size - len(residual)
    return math.sqrt((residual**2).sum() / df), df


def found_by(sd: float, df: int) -> str:
    """The difference that 3 (8) runs per variant detect, with the sd and its degrees of freedom."""
    return f"{short(detectable(sd, 3))} ({short(detectable(sd, 8))}), sd {short(sd, 4)}, {df} df"


def noise() -> str:
    """The spread of runs with the same settings."""
    nine = grpo_runs()
    own = own_evaluations(GRPO, -1)
    residual = within_variants("base")
    paired = residual - residual.mean(0, keepdims=True)
    n, seeds = residual.shape
    p = nine.mean()
    curve = [
        np.mean([CELLS["base", "grpo", s]["curves"]["accuracy"][at]["held_out"] for s in SEEDS])
        for at in range(3)
    ]
    return table(
        ["noise in `base`", "figure"],
        [
            [
                "nine runs of GRPO, 150 puzzles x 8 responses: mean, sd, range",
                f"{short(p)}, {short(nine.std(ddof=1), 4)}, "
                f"{short(nine.min())} to {short(nine.max())}",
            ],
            [
                "the same nine, last evaluation during training, 150 puzzles x 2: sd",
                short(own.std(ddof=1), 4),
            ],
            [
                "upper bound of the noise of 8 (2) responses: binomial sd of 1,200 (300) draws",
                f"{short(math.sqrt(p * (1 - p) / 1200), 4)} "
                f"({short(math.sqrt(p * (1 - p) / 300), 4)})",
            ],
            [
                "sd of a run within its variant, 17 variants: alone; paired by seed",
                f"{short(pooled_sd('base')[0], 4)}; "
                f"{short(math.sqrt((paired**2).sum() / ((n - 1) * (seeds - 1))), 4)}",
            ],
            [
                "difference found by 3 (8) runs with 80 % power: `base`, sd of all variants",
                found_by(*pooled_sd("base")),
            ],
            ["the same, sd of the nine runs of GRPO", found_by(float(nine.std(ddof=1)), 8)],
            ["`high_lr`, sd of its four variants", found_by(*pooled_sd("high_lr"))],
            [
                "`high_lr`, sd of its three runs of GRPO",
                found_by(float(held_out("high_lr", "grpo").std(ddof=1)), 2),
            ],
            [
                "GRPO's held-out accuracy before, after 10 and after 20 rollouts",
                ", ".join(short(value) for value in curve),
            ],
        ],
    )


def accuracy_by_regime() -> str:
    """GRPO's held-out accuracy, and each form's minus it, paired by seed."""
    rows = []
    for regime in REGIMES:
        cells = [with_interval(held_out(regime, "grpo"), sign=False)]
        for variant in FORMS:
            cells.append(
                with_interval(held_out(regime, variant) - held_out(regime, "grpo"))
                if has(regime, variant)
                else ""
            )
        rows.append([f"`{regime}`", *cells])
    return table(
        ["regime", "GRPO", "inside, U = 1.4, minus GRPO", "outside, minus", "normalised, minus"],
        rows,
    )


def accuracy_over_regimes() -> str:
    """Each form minus GRPO: regimes as the sample, and seeds as the sample."""
    rows = []
    for variant in FORMS:
        regimes = [r for r in REGIMES if has(r, variant)]
        paired = np.array([held_out(r, variant) - held_out(r, "grpo") for r in regimes])
        rows.append(
            [
                f"`{variant}`",
                str(len(regimes)),
                with_interval(paired.mean(1)),
                with_interval(paired.mean(0)),
                f"{(paired < 0).sum()} of {paired.size}",
                f"{short(paired.min(), sign=True)} to {short(paired.max(), sign=True)}",
            ]
        )
    return table(
        [
            "variant",
            "regimes",
            "minus GRPO, interval over regimes",
            "interval over seeds",
            "pairs below 0",
            "range of pairs",
        ],
        rows,
    )


def zeroed_and_accuracy() -> str:
    """The share of tokens that the clip zeroes in `base`, and the accuracy."""
    nine = float(grpo_runs().mean())
    rows = []
    for variant in TABLE_7:
        begins = dead_zone_begins(variant)
        rows.append(
            [
                f"`{variant}`",
                "none" if begins is None else short(begins),
                short(float(figures("base", variant, "zeroed_pos").mean())),
                with_interval(held_out("base", variant), sign=False),
                short(float(held_out("base", variant).mean()) - nine, sign=True),
            ]
        )
    return table(
        [
            "`base`, inside the clip",
            "zeroed for p above",
            "share zeroed of A > 0",
            "held-out",
            "minus nine of GRPO",
        ],
        rows,
    )


def detectable(sd: float, runs: int) -> float:
    """The difference of two means that a two-sample t-test finds with 80 % power at .05."""
    df = 2 * runs - 2
    critical = stats.t.ppf(0.975, df)

    def power(difference: float) -> float:
        shift = difference / (sd * math.sqrt(2 / runs))
        return float(stats.nct.sf(critical, df, shift))  # the other tail is below 1e-6

    return float(optimize.brentq(lambda d: power(d) - 0.8, 1e-4, 4 * sd))


def permutation_p(group: np.ndarray, others: np.ndarray) -> float:
    """Two-sided exact p of the difference of two means."""
    values = np.concatenate([group, others])
    observed = abs(group.mean() - others.mean())
    total, extreme = 0, 0
    for chosen in itertools.combinations(range(len(values)), len(group)):
        rest = np.delete(values, chosen)
        extreme += abs(values[list(chosen)].mean() - rest.mean()) >= observed - 1e-12
        total += 1
    return extreme / total


def other_weightings() -> str:
    """The other weightings of `base` minus the nine runs that are GRPO."""
    nine = grpo_runs()
    names = (
        "sg_outside",
        "sg_normalized",
        "sg_inside_u1.2",
        "tau_2",
        "random",
        "ar",
        "lopti",
        "reverse",
    )
    rows = []
    for variant in names:
        p = permutation_p(held_out("base", variant), nine)
        rows.append(
            [
                f"`{variant}`",
                short(held_out("base", variant).mean()),
                short(held_out("base", variant).mean() - nine.mean(), sign=True),
                short(p),
                short(1 - (1 - p) ** len(names)),
                short(float(figures("base", variant, "weight_mean").mean())),
            ]
        )
    return table(
        ["`base`", "held-out", "minus nine of GRPO", "p", "p of eight tests", "mean weight"],
        rows,
    )


def without_a_dead_zone() -> str:
    """Found afterwards: the forms without a dead zone minus GRPO, after 10 and 20 rollouts."""
    after_10 = own_evaluations(NO_DEAD_ZONE, 1), own_evaluations(GRPO, 1)
    after_20 = np.concatenate([held_out("base", v) for v in NO_DEAD_ZONE]), grpo_runs()
    return table(
        ["nine runs without a dead zone, minus nine of GRPO", "held-out", "t", "p"],
        [
            [
                when,
                short(float(ours.mean() - grpo.mean()), sign=True),
                f"{stats.ttest_ind(ours, grpo).statistic:+.2f}",
                short(float(stats.ttest_ind(ours, grpo).pvalue)),
            ]
            for when, (ours, grpo) in [
                ("after 10 rollouts, 2 responses per puzzle", after_10),
                ("after 20 rollouts, 8 responses per puzzle", after_20),
            ]
        ],
    )


def peaks() -> str:
    """The largest gradient norm over the run's median, seed by seed."""
    rows = []
    for regime in REGIMES:
        cells = []
        for variant in ("grpo", "sg_outside", "sg_normalized", "sg_inside"):
            cells.append(
                ", ".join(f"{value:.0f}" for value in figures(regime, variant, "grad_norm_peak"))
                if has(regime, variant)
                else ""
            )
        rows.append([f"`{regime}`", *cells])
    return table(
        ["largest norm / median", "GRPO", "outside", "normalised", "inside, U = 1.4"], rows
    )


def clipped_steps() -> str:
    """How often the gradient norm was above ``actor.max_norm``."""
    rows = []
    for regime in REGIMES:
        cells = []
        for variant in ("grpo", *FORMS):
            if not has(regime, variant):
                cells.append("")
                continue
            norms = np.concatenate(
                [CELLS[regime, variant, seed]["curves"]["grad_norm"] for seed in SEEDS]
            )
            cells.append(f"{(norms > MAX_NORM).sum()} of {len(norms)}")
        rows.append([f"`{regime}`", *cells])
    return table(["steps with norm > 1", "GRPO", "inside, U = 1.4", "outside", "normalised"], rows)


def rank_correlation(published: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Spearman's, and its exact two-sided p over the permutations of ours."""
    observed = stats.spearmanr(published, ours)[0]
    every = [abs(stats.spearmanr(published, order)[0]) for order in itertools.permutations(ours)]
    return float(observed), float(np.mean([value >= abs(observed) - 1e-9 for value in every]))


def rankings() -> str:
    """Rank correlations of the papers' accuracies with ours."""
    rows = []
    for name, ranking in PUBLISHED.items():
        published = list(ranking.values())
        accuracy = np.array([held_out("base", variant) for variant in ranking])  # [variants, seeds]
        rho, p = rank_correlation(published, accuracy.mean(1))
        by_seed = [stats.spearmanr(published, of_seed)[0] for of_seed in accuracy.T]
        rows.append(
            [
                name,
                str(len(ranking)),
                short(rho, 2, sign=True),
                short(p),
                ", ".join(short(float(value), 2, sign=True) for value in by_seed),
            ]
        )
    return table(["ranking", "rows", "correlation of means", "exact p", "by seed"], rows)


def single_runs() -> str:
    """GRPO-SG beside GRPO in lab/experiments/kk_cpu/results.json, paired by seed."""
    runs = json.loads((ROOT / "lab" / "experiments" / "kk_cpu" / "results.json").read_text())[
        "runs"
    ]
    pairs = zip(runs["grpo_sg"], runs["grpo"], strict=True)
    differences = np.array([sg["accuracy_after"] - grpo["accuracy_after"] for sg, grpo in pairs])
    return table(
        ["`kk_cpu.json`", "GRPO-SG minus GRPO"],
        [
            [
                "three pairs; mean with its 95 % t-interval",
                f"{', '.join(short(d, sign=True) for d in differences)}; "
                f"{with_interval(differences)}",
            ]
        ],
    )


def gap_and_sharpness() -> str:
    """Training minus held-out accuracy, and sharpness on one batch of the start model."""
    rows = []
    for regime, variant in [
        ("base", "grpo"),
        ("base", "sg_outside"),
        ("base", "range_0.8_1.5"),
        ("base", "range_0.5_1.5"),
        ("long", "grpo"),
        ("long", "sg_outside"),
        ("no_dual_clip", "grpo"),
        ("no_dual_clip", "sg_outside"),
    ]:
        rows.append(
            [
                f"`{regime}` `{variant}`",
                ", ".join(short(v) for v in figures(regime, variant, "gap_after")),
                short(float(figures(regime, variant, "sharpness").mean())),
                short(float(held_out(regime, variant).mean())),
            ]
        )
    return table(
        ["run", "gap, by seed", "sharpness, rho = .05", "held-out"],
        rows,
    )


def tables() -> Iterator[str]:
    yield noise()
    yield accuracy_by_regime()
    yield accuracy_over_regimes()
    yield zeroed_and_accuracy()
    yield other_weightings()
    yield without_a_dead_zone()
    yield peaks()
    yield clipped_steps()
    yield rankings()
    yield gap_and_sharpness()
    yield single_runs()


if __name__ == "__main__":
    print("\n\n".join(tables()))
