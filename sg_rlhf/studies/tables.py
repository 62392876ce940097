"""A study's Markdown: a table per regime, one over all of them, and the printed rankings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sg_rlhf.report.figures import MEDIAN_WINDOW, SPIKE_FACTOR, source_name
from sg_rlhf.studies.plan import Study
from sg_rlhf.studies.results import MIN_SEEDS

#: What the first cells did not keep: a column only where there is a run that has it.
LATER = ("weight_std", "sure_last")
#: key of a cell, heading, digits
COLUMNS = (
    ("held_out_after", "held-out", 3),
    ("larger_after", "larger", 3),
    ("gap_after", "gap", 3),
    ("grad_norm_mean", "grad norm mean", 3),
    ("grad_norm_std", "std", 3),
    ("grad_norm_max", "max", 2),
    ("grad_norm_peak", "max / median", 2),
    ("spikes", "spikes", 1),
    ("sharpness", "sharpness", 4),
    ("entropy_after", "entropy", 3),
    ("weight_mean", "mean w", 3),
    ("weight_std", "std of w", 3),
    ("sure_last", "p >= .95", 2),
    ("zeroed_pos", "zeroed A > 0", 3),
    ("seconds_per_rollout", "s/rollout", 1),
)


def table(
    study: Study,
    rows: list[dict[str, Any]],
    pooled: list[dict[str, Any]],
    rankings: list[dict[str, Any]],
) -> str:
    """Markdown of what `summarize`, `over_regimes` and `beside_published` found."""
    lines = [f"# {study.name}", "", study.file.about + ".", ""]
    columns = [c for c in COLUMNS if c[0] not in LATER or any(c[0] in row for row in rows)]
    columns[1:1] = [(f"held_out_{size}_after", source_name(size), 3) for size in sizes(rows)]
    for regime, settings in study.file.regimes.items():
        of_regime = [row for row in rows if row["regime"] == regime]
        if not of_regime:
            continue
        headings = ["variant", "seeds", *(title for _, title, _ in columns)]
        headings.insert(3, f"minus {study.file.baseline}")
        headings.append(f"max / median over {study.file.baseline}'s")
        lines += [f"## {regime}", "", settings.about, ""]
        entries = []
        for row in of_regime:
            values = [_number(row.get(key), digits) for key, _, digits in columns]
            values.insert(1, _number(row.get("held_out_after_difference"), 3, signed=True))
            entries.append([row["variant"], str(len(row["seeds"])), *values, _ratio(row)])
        lines += _markdown(headings, entries)
    if pooled:
        lines += _pooled_table(study, pooled)
    for ranking in rankings:
        lines += _ranking_table(ranking)
    lines += [
        "In a regime: means over seeds with half of their 95 % t-interval where there are "
        f"{MIN_SEEDS} or more; "
        f"differences to {study.file.baseline} are paired by seed. held-out: of the last "
        "checkpoint. gap: accuracy on training "
        "prompts minus held-out. Gradient norms are before clipping, over all optimizer steps; "
        f"spikes are those above {SPIKE_FACTOR:g} times the median of the {MEDIAN_WINDOW} before."
        + (
            " std of w: within an optimizer step, mean over the steps. p >= .95: share of the "
            "last rollout's tokens."
            if any(key in row for key in LATER for row in rows)
            else ""
        ),
        "",
    ]
    return "\n".join(lines)


def _pooled_table(study: Study, pooled: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## All regimes together",
        "",
        f"Pairs with {study.file.baseline} of the same regime and seed; lower: in how many of "
        "them. The mean is that of the regimes' means, and the interval takes the regimes for its "
        f"sample, from {MIN_SEEDS} of them on.",
        "",
    ]
    headings = ["variant", "regimes", "pairs", "held-out minus", "lower", "max / median over"]
    entries = []
    for entry in pooled:
        difference = entry["held_out_after_difference"]
        lower = sum(value < 0 for value in difference["values"])
        entries.append(
            [
                entry["variant"], str(len(entry["regimes"])), str(difference["pairs"]),
                _number(difference, 3, signed=True), str(lower), _ratio(entry),
            ]
        )  # fmt: skip
    return [*lines, *_markdown(headings, entries)]


def _ranking_table(ranking: dict[str, Any]) -> list[str]:
    lines = [
        f"## {ranking['name']}",
        "",
        f"Beside the printed accuracy: {ranking['about']}. Dead zone: the tokens that have no "
        "policy gradient even on-policy.",
        "",
    ]
    headings = ["variant", "printed", "held-out here", "dead zone", "zeroed A > 0"]
    entries = []
    for row in ranking["variants"]:
        ours, zeroed = _number(row.get("held_out_after"), 3), _number(row.get("zeroed_pos"), 3)
        zones = [
            f"{name}, p {first:.3g} to {last:.3g}"
            for name, zone in (("A > 0", "positive"), ("A < 0", "negative"))
            for first, last in filter(None, [row["dead_zones"][zone]])
        ]
        entries.append([row["variant"], f"{row['published']:.2f}", ours, "; ".join(zones), zeroed])
    lines += _markdown(headings, entries)
    if correlation := ranking.get("rank_correlation"):
        seeds = ", ".join(f"{value:+.2f}" for value in correlation["values"])
        by_seed = f"; by seed: {seeds}" if seeds else ""
        of_means = f"{correlation['mean']:+.2f}"
        lines += [f"Spearman's rank correlation of the means: {of_means}{by_seed}.", ""]
    return lines


def _markdown(headings: Sequence[str], entries: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, and an empty one after it."""
    head, *body = ["| " + " | ".join(line) + " |" for line in (headings, *entries)]
    return [head, "|" + "---|" * len(headings), *body, ""]


def sizes(rows: list[dict[str, Any]]) -> list[str]:
    """The data sources that held-out accuracy was measured by."""
    keys = [key for row in rows for key in row]
    matches = [re.fullmatch(r"held_out_(.+)_after", key) for key in keys]
    return sorted({match[1] for match in matches if match})


def _ratio(row: dict[str, Any]) -> str:
    found = row.get("grad_norm_peak_ratio")
    if found is None:
        return ""
    if math.isnan(found["ci95_low"]):
        return f"{found['mean']:.2f}"
    return f"{found['mean']:.2f} ({found['ci95_low']:.2f} to {found['ci95_high']:.2f})"


def _number(entry: dict[str, float] | None, digits: int, *, signed: bool = False) -> str:
    if entry is None:
        return ""
    text = f"{entry['mean']:{'+' if signed else ''}.{digits}f}"
    half = entry["ci95"]
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"
