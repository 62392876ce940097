"""The parts of a rollout's wall clock: their names in ``metrics.jsonl``, and how they add up.

Every name is a key ``timing/NAME``. The trainer writes them, the report draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

PREFIX = "timing/"
TOTAL = "step_total"
#: What no part has a name for.
OTHER = "other"

#: From the row of one rollout to the row of the next, in this order; they add up to ``step_total``.
PARTS = (
    "generation", "make_experience", "hand_over", "ppo_train", "broadcast", "sync_check",
    "logging", OTHER,
)  # fmt: skip
#: What is known of some parts from within, and is counted in them as well.
SUBSECTIONS: dict[str, tuple[str, ...]] = {
    "generation": ("engines_wake", "longest_response"),
    "make_experience": ("old_log_probs", "reference_log_probs", "reward_model", "values"),
    "ppo_train": (
        "update_old_log_probs", "update_reference_log_probs", "update_forward", "update_backward",
    ),
}  # fmt: skip
#: Of one rank, the first with `ds.enable_sleep`, else the last; the other parts are the
#: controller's.
OF_THE_RANK = SUBSECTIONS["ppo_train"]
#: Not in ``step_total``: they come after some rollouts only, and stand in the next rollout's row.
EXTRA = ("evaluation", "checkpoint")

#: The share of a rollout's prompts that are finished when ``longest_response`` begins.
TAIL_QUANTILE = 0.9


def row(own: Mapping[str, float]) -> dict[str, float]:
    """The keys of ``metrics.jsonl`` of the seconds that each part took without those within it."""
    seconds = {}
    for part in PARTS:
        inner = {name: own.get(name, 0.0) for name in SUBSECTIONS.get(part, ())}
        seconds[part] = own.get(part, 0.0) + sum(inner.values())
        if part != "ppo_train":
            seconds |= inner
    seconds[TOTAL] = sum(seconds[part] for part in PARTS)
    seconds |= {name: own.get(name, 0.0) for name in EXTRA}
    return {PREFIX + name: value for name, value in seconds.items()}


def exclusive_seconds(metrics: Mapping[str, object]) -> dict[str, float]:
    """Seconds of a row of ``metrics.jsonl`` by name, none of them counted twice.

    What is within a part has its own name, the rest of it the part's. ``other`` is what is left of
    ``step_total``. A row without that, or with one that is no number, gives {}.
    """

    def seconds(name: str) -> float:
        value = metrics.get(PREFIX + name)
        usable = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
        return float(value) if usable and isinstance(value, (int, float)) else 0.0

    left = seconds(TOTAL)
    if not left:
        return {}
    found: dict[str, float] = {}
    for part in PARTS[:-1]:
        whole = seconds(part)
        left -= whole
        for name in SUBSECTIONS.get(part, ()):
            found[name] = min(whole, seconds(name))
            whole -= found[name]
        found[part] = whole
    return found | {OTHER: max(0.0, left)}


def longest_response(finished: list[float]) -> float:
    """Seconds from the moment when 90 % of the prompts were finished until all were.

    Args:
        finished: when each prompt was, in seconds, in any order.
    """
    if not finished:
        return 0.0
    ordered = sorted(finished)
    return ordered[-1] - ordered[max(1, int(TAIL_QUANTILE * len(ordered))) - 1]
