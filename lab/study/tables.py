"""A study's table: a row per regime and variant, in Markdown."""

from __future__ import annotations

import math
from typing import Any

from lab.study.plan import Study
from lab.study.results import MIN_SEEDS, main_accuracy
from sg_rlhf.common.statistics import SPIKE_FACTOR, SPIKE_WINDOW
from sg_rlhf.common.text import table_head, table_row

#: key of a cell, heading, digits: after the accuracies, where some run has it.
COLUMNS = (
    ("gap_after", "gap", 3),
    ("grad_norm_mean", "grad norm mean", 3),
    ("grad_norm_peak", "max / median", 2),
    ("spikes", "spikes", 1),
    ("sharpness", "sharpness", 4),
    ("entropy_after", "entropy", 3),
    ("weight_mean", "mean w", 3),
    ("zeroed_pos", "zeroed A > 0", 3),
    ("seconds_per_rollout", "s/rollout", 1),
)


def table(study: Study, rows: list[dict[str, Any]]) -> str:
    """Markdown of what `summarize` found."""
    main, baseline = main_accuracy(rows), study.file.baseline
    keys = dict.fromkeys(key for row in rows for key in row)
    fixed = [column for column in COLUMNS if column[0] in keys]
    named = [key for key in keys if key.endswith("_after") and key not in {c[0] for c in COLUMNS}]
    names = [key.removesuffix("_after") for key in named]
    # Of sets, not of the sources in a set.
    sets = [n for n in names if not any(n.startswith(f"{name}_") for name in names)]
    columns = [(f"{n}_after", n, 3) for n in sets if f"{n}_after" != main] + fixed
    headings = ["regime", "variant", "seeds", main.removesuffix("_after"), f"minus {baseline}"]
    lines = [f"# {study.name}", "", f"{study.file.about}.", ""]
    regimes = dict.fromkeys(row["regime"] for row in rows)
    about = [f"- {name}: {text}" for name in regimes if (text := study.file.regimes[name].about)]
    lines += [*about, ""] if about else []
    lines += table_head([*headings, *(title for _, title, _ in columns)])
    for row in rows:
        accuracy = row.get(main, {})
        cells = [row["regime"], row["variant"], str(len(row["seeds"])), _number(accuracy, 3)]
        cells.append(_number(accuracy.get("difference", {}), 3, sign="+"))
        lines.append(table_row([*cells, *(_number(row.get(key, {}), d) for key, _, d in columns)]))
    return "\n".join(
        [
            *lines, "",
            "Means over seeds with half of their 95 % t-interval where there are "
            f"{MIN_SEEDS} or more; differences to {baseline} are paired by seed. Accuracies are of "
            "the last checkpoint. gap: accuracy on training prompts minus held-out. Gradient norms "
            "are before clipping, over all optimizer steps; spikes are those above "
            f"{SPIKE_FACTOR:g} times the median of the {SPIKE_WINDOW} before.",
            "",
        ]
    )  # fmt: skip


def _number(entry: dict[str, Any], digits: int, sign: str = "") -> str:
    if not entry:
        return ""
    text = f"{entry['mean']:{sign}.{digits}f}"
    return text if math.isnan(entry["ci95"]) else f"{text} ± {entry['ci95']:.{digits}f}"
