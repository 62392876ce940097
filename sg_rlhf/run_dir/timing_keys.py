"""Timing sections of a rollout step: their names in ``metrics.jsonl``, and how they add up.

Each name is a key ``timing/NAME``, in seconds. The trainer writes them and the report draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

PREFIX = "timing/"
TOTAL = "step_total"
#: Time in no other section.
OTHER = "other"

#: Sections from one row to the next, in this order. Their sum is ``step_total``.
PARTS = (
    "generation", "make_experience", "hand_over", "ppo_train", "broadcast", "sync_check",
    "logging", OTHER,
)  # fmt: skip
#: Subsections of some sections; a section's time includes them.
SUBSECTIONS: dict[str, tuple[str, ...]] = {
    "generation": ("engines_wake", "longest_response"),
    "make_experience": ("old_log_probs", "reference_log_probs", "reward_model"),
    "ppo_train": (
        "update_old_log_probs", "update_reference_log_probs", "update_forward", "update_backward",
    ),
}  # fmt: skip
#: Measured on one rank: the first with `ds.enable_sleep`, else the last. The other sections are
#: measured in the controller.
OF_THE_RANK = SUBSECTIONS["ppo_train"]
#: Not in ``step_total``: they follow some rollout steps only and are in the next step's row.
EXTRA = ("evaluation", "checkpoint")

#: Share of the prompts that are finished when ``longest_response`` begins.
TAIL_QUANTILE = 0.9


def row(exclusive: Mapping[str, float]) -> dict[str, float]:
    """The keys of ``metrics.jsonl``.

    Args:
        exclusive: section or subsection -> its seconds without its subsections.
    """
    seconds = {}
    for part in PARTS:
        inner = {name: exclusive.get(name, 0.0) for name in SUBSECTIONS.get(part, ())}
        seconds[part] = exclusive.get(part, 0.0) + sum(inner.values())
        if part != "ppo_train":
            seconds |= inner
    seconds[TOTAL] = sum(seconds[part] for part in PARTS)
    seconds |= {name: exclusive.get(name, 0.0) for name in EXTRA}
    return {PREFIX + name: value for name, value in seconds.items()}


def exclusive_seconds(metrics: Mapping[str, object]) -> dict[str, float]:
    """Seconds per section and subsection of a row of ``metrics.jsonl``, none counted twice.

    A section has its time without its subsections. ``other`` is the rest of ``step_total``. A row
    without a usable ``step_total`` gives {}.
    """

    def seconds(name: str) -> float:
        value = metrics.get(PREFIX + name)
        usable = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
        return float(value) if usable and isinstance(value, (int, float)) else 0.0

    remaining = seconds(TOTAL)
    if not remaining:
        return {}
    exclusive: dict[str, float] = {}
    for part in PARTS[:-1]:
        of_part = seconds(part)
        remaining -= of_part
        for name in SUBSECTIONS.get(part, ()):
            exclusive[name] = min(of_part, seconds(name))
            of_part -= exclusive[name]
        exclusive[part] = of_part
    return exclusive | {OTHER: max(0.0, remaining)}


def longest_response(finished: list[float]) -> float:
    """Seconds from when 90 % of the prompts were finished until all were.

    Args:
        finished: time at which each prompt was finished, in seconds, in any order.
    """
    if not finished:
        return 0.0
    ordered = sorted(finished)
    return ordered[-1] - ordered[max(1, int(TAIL_QUANTILE * len(ordered))) - 1]
