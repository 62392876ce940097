"""Evaluations in training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sg_rlhf.overlay.controller.evaluation import combine, compute_eval_metrics

# -- In-training evaluation reports shares of correct answers, not rewards -----------------------


def sample(prompt: str, reward: float, correct: float | None, length: int = 5) -> Any:
    return SimpleNamespace(
        prompts=[prompt],
        rewards=torch.tensor([reward]),
        response_length=torch.tensor([length]),
        truncated=torch.tensor([False]),
        info={} if correct is None else {"correct": torch.tensor([correct])},
    )


LOADER = [(["a", "b"], ["p1", "p2"], ["", ""], [None, None]), (["b"], ["p3"], [""], [None])]


def test_accuracy_pass_at_n_and_mean_reward_by_source() -> None:
    samples = [
        sample("p1", 3.0, 1.0), sample("p1", -0.5, 0.0),
        sample("p3", -3.0, 0.0), sample("p3", -1.0, 0.0),
        sample("p2", 3.0, 1.0), sample("p2", 3.0, 1.0),
    ]  # fmt: skip
    logs = compute_eval_metrics(LOADER, samples, 2)
    assert logs["eval_a_accuracy"] == 0.5 and logs["eval_a_pass2"] == 1.0
    assert logs["eval_b_accuracy"] == 0.5 and logs["eval_b_pass2"] == 0.5
    assert logs["eval_accuracy"] == logs["eval_pass1"] == 0.5
    assert logs["eval_pass2"] == pytest.approx(2 / 3)
    assert logs["eval_a_reward_mean"] == 1.25
    assert logs["eval_num_samples"] == 6
    # shares 0.5, 0, 1: sample variance 0.25
    assert logs["eval_accuracy_ci95"] == pytest.approx(1.959964 * (0.25 / 3) ** 0.5)


def test_a_reward_function_without_correctness_gets_no_accuracy() -> None:
    logs = compute_eval_metrics(LOADER, [sample("p1", 0.3, None)], 1)
    assert logs["eval_reward_mean"] == pytest.approx(0.3)
    assert not any("accuracy" in key or "pass" in key for key in logs)


def test_no_samples_no_metrics() -> None:
    assert compute_eval_metrics(LOADER, [], 4) == {}


def test_several_sets_average_as_the_paper_averages_its_columns() -> None:
    greedy = compute_eval_metrics(LOADER, [sample("p1", 1.0, 1.0)], 1)
    sampled = compute_eval_metrics(
        LOADER, [sample("p1", 1.0, 1.0), sample("p1", 0.0, 0.0), *[sample("p2", 0.0, 0.0)] * 2], 2
    )
    logs = combine({"math500": greedy, "amc": sampled})
    assert logs["eval_math500_accuracy"] == 1.0 and logs["eval_amc_accuracy"] == 0.25
    assert logs["eval_amc_pass2"] == 0.5 and "eval_math500_pass2" not in logs
    assert logs["eval_accuracy"] == 0.625 and logs["eval_num_prompts"] == 3
    assert logs["eval_accuracy_ci95"] == pytest.approx(sampled["eval_accuracy_ci95"] / 2)
    # Two sources in one set: its accuracy by source; a single one would say the same again.
    assert (logs["eval_amc_a_accuracy"], logs["eval_amc_b_accuracy"]) == (0.5, 0.0)
    assert not any("math500_a_" in key for key in logs)


def test_a_set_without_accuracy_leaves_the_mean_out() -> None:
    graded = compute_eval_metrics(LOADER, [sample("p1", 1.0, 1.0)], 1)
    ungraded = compute_eval_metrics(LOADER, [sample("p1", 1.0, None)], 1)
    logs = combine({"x": graded, "y": ungraded})
    assert "eval_accuracy" not in logs and logs["eval_reward_mean"] == 1.0
