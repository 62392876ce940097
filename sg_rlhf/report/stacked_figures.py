"""The figures of each rollout's parts, stacked: its seconds, and the age of its tokens."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sg_rlhf.report.chart import Chart, Missing, Panel, Series, look
from sg_rlhf.report.runs import Group, Row, number
from sg_rlhf.run_dir.timing_keys import OTHER, exclusive_seconds
from sg_rlhf.run_dir.weight_versions import SHARE_OF_AGE

Look = Mapping[str, Any]
#: Rollout -> the value of each part.
Parts = dict[int, dict[str, float]]

#: Part of a rollout's time -> the sections of it and how it is drawn.
PARTS: dict[str, tuple[tuple[str, ...], Look]] = {
    "generation": (("generation",), {"colour": "s0"}),
    "longest response": (("longest_response",), {"colour": "s0", "light": True}),
    "engines wake, sleep": (("engines_wake",), {"colour": "s5"}),
    "old log-probs": (("old_log_probs", "update_old_log_probs"), {"colour": "s4"}),
    "reference, reward model": (
        ("reference_log_probs", "update_reference_log_probs", "reward_model", "make_experience"),
        {"colour": "s4", "light": True},
    ),
    "forward": (("update_forward",), {"colour": "s1"}),
    "backward, optimizer": (("update_backward",), {"colour": "s1", "light": True}),
    "rest of the update": (("hand_over", "ppo_train"), {"colour": "s3"}),
    "weight sync": (("broadcast", "sync_check"), {"colour": "s2"}),
    "other": (("logging", OTHER), {"colour": "muted"}),
}  # fmt: skip


def seconds_per_rollout(groups: list[Group]) -> Chart:
    """Seconds of each rollout, stacked by part; a panel for each configuration."""

    def parts(row: Row) -> dict[str, float]:
        seconds = exclusive_seconds(row)
        if not seconds:
            return {}
        return {part: sum(seconds[name] for name in names) for part, (names, _) in PARTS.items()}

    by_group = [_mean_of_seeds(group, parts) for group in groups]
    totals = [[sum(values.values()) for values in steps.values()] for steps in by_group]
    if not any(totals):
        raise Missing("The runs log no timings.")
    # The first rollout, in which things are compiled, may not flatten the others. It is cut, and
    # its seconds are written above it.
    top = 1.1 * max(max(found[1:] or found) for found in totals if found)
    cut = [
        f"rollout {min(steps)} is cut: {found[0]:.3g} s" if found and found[0] > top else ""
        for steps, found in zip(by_group, totals, strict=True)
    ]
    looks = {part: how for part, (_, how) in PARTS.items()}
    return _stacked(groups, by_group, looks, "seconds", top, cut)


def staleness(groups: list[Group]) -> Chart:
    """Shares of each rollout's tokens by age in weight syncs, a panel for each configuration."""

    def shares(row: Row) -> dict[str, float]:
        ages = [key for key in row if key.startswith(SHARE_OF_AGE)]
        return {f"age {key.removeprefix(SHARE_OF_AGE)}": number(row, key) for key in ages}

    every = [_mean_of_seeds(group, shares) for group in groups]
    shown = [i for i, found in enumerate(every) if found]
    if not shown:
        raise Missing("The runs are synchronous: every token was sampled by the current policy.")
    by_group = [every[i] for i in shown]
    ages = {name for steps in by_group for values in steps.values() for name in values}
    ordered = sorted(ages, key=lambda name: int(name.split()[1]))
    looks: dict[str, Look] = {name: {"colour": look(i)["colour"]} for i, name in enumerate(ordered)}
    titles = [""] * len(shown)
    return _stacked([groups[i] for i in shown], by_group, looks, "share of tokens", 1.0, titles)


def _mean_of_seeds(group: Group, of_row: Callable[[Row], dict[str, float]]) -> Parts:
    """The named values of the rows of each rollout, the mean over the seeds that have it."""
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for row in (row for run in group.runs for row in run.metrics):
        values = of_row(row)
        if values and all(map(math.isfinite, values.values())):
            found[int(row["global_step"])].append(values)
    return {
        step: {
            name: statistics.fmean(values.get(name, 0.0) for values in rows)
            for name in dict.fromkeys(name for values in rows for name in values)
        }
        for step, rows in sorted(found.items())
    }


def _stacked(
    groups: Sequence[Group],
    by_group: Sequence[Parts],
    looks: Mapping[str, Look],
    label: str,
    top: float,
    titles: Sequence[str],
) -> Chart:
    """A panel per group with its values of each rollout, stacked in the order of ``looks``."""
    panels = []
    for group, steps, title in zip(groups, by_group, titles, strict=True):
        curves = {
            name: [(float(step), values.get(name, 0.0)) for step, values in steps.items()]
            for name in looks
        }
        parts = [
            Series(name, [curve], kind="stack", **looks[name])
            for name, curve in curves.items()
            if any(y for _, y in curve)
        ]
        names = [group.label] if len(groups) > 1 else []
        title = ": ".join([*names, title] if title else names)
        panels.append(Panel(label, parts, scale="zero", top=top, title=title))
    return Chart(panels, columns=3)
