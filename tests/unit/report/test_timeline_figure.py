"""When each process worked, from the seconds and the end of each rollout."""

from __future__ import annotations

from typing import Any

import pytest

from sg_rlhf.report.timeline_figure import spans

SECONDS = {
    "generation": 10.0, "engines_wake": 1.0, "longest_response": 2.0, "make_experience": 4.0,
    "reference_log_probs": 3.0, "ppo_train": 20.0, "update_forward": 15.0, "broadcast": 2.0,
    "logging": 0.0, "step_total": 36.5, "evaluation": 5.0, "checkpoint": 1.5,
}  # fmt: skip


def row(step: int, end: float | None = None, **changed: float) -> dict[str, Any]:
    timing = {f"timing/{name}": seconds for name, seconds in (SECONDS | changed).items()}
    return {"global_step": step, **timing, **({} if end is None else {"time": end})}


def of(found: list[Any]) -> list[tuple[str, float, float]]:
    return [(phase.title, start, pytest.approx(seconds)) for phase, start, seconds in found]  # type: ignore[misc]


def test_the_phases_of_a_rollout_follow_one_another() -> None:
    assert of(spans([row(1, end=1000.0)])) == [
        ("generation", 0.0, 10.0), ("log-probs, values", 10.0, 3.0),
        ("experience, logging", 13.0, 1.0), ("update", 14.0, 20.0), ("weight sync", 34.0, 2.0),
        ("experience, logging", 36.0, 0.5),
    ]  # fmt: skip


def test_what_follows_a_rollout_stands_before_the_next_one() -> None:
    """Evaluation and checkpoint are in the next row, and not in its total."""
    found = spans([row(1, end=1000.0), row(2, end=1043.0 + 7.0)])
    second = of(found[6:])
    # 43 seconds long, and 7 in which nothing is known (a restart, say) before it.
    assert second[:3] == [
        ("evaluation", 43.5, 5.0), ("checkpoint", 48.5, 1.5), ("generation", 50.0, 10.0),
    ]  # fmt: skip


def test_without_times_rows_follow_at_once() -> None:
    found = spans([row(1), row(2, evaluation=0.0, checkpoint=0.0), {"global_step": 3}])
    assert [start for phase, start, _ in found if phase.title == "generation"] == [0.0, 36.5]
