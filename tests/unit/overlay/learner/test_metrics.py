"""Means of an update's metrics over micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sg_rlhf.overlay.learner.metrics import MicroBatchMetrics, UpdateMeans


def means() -> UpdateMeans:
    one_rank: Any = SimpleNamespace(all_reduce=lambda data: data)
    return UpdateMeans(one_rank)


def test_scalars_are_weighted_by_tokens_and_vectors_by_samples() -> None:
    found = means()
    for loss, rewards, tokens, learning_rate in (
        (1.0, [0.0, 1.0], 10, 0.1), (4.0, [1.0], 30, 0.2)
    ):  # fmt: skip
        values = {"policy_loss": torch.tensor(loss), "reward": torch.tensor(rewards)}
        latest = {"actor_lr": learning_rate}
        bar = found.add(MicroBatchMetrics(values, latest, tokens, len(rewards)))
        assert bar["act_loss"] == pytest.approx(loss)
    result = found.result()
    assert result["policy_loss"] == pytest.approx((10 * 1.0 + 30 * 4.0) / 40)
    assert result["reward"] == pytest.approx(2 / 3) and result["actor_lr"] == 0.2


def test_a_micro_batch_without_tokens_has_no_part_in_the_means() -> None:
    nan = torch.tensor(float("nan"))
    found = means()
    found.add(MicroBatchMetrics({"kl": nan, "reward": torch.tensor([9.0, nan])}, {}, 0, 2))
    assert found.result() == {"kl": 0.0, "reward": 0.0}
    found.add(MicroBatchMetrics({"kl": torch.tensor(0.5), "reward": torch.ones(2)}, {}, 7, 2))
    assert found.result() == {"kl": 0.5, "reward": 1.0}
