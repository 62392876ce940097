"""Masks the samples of a rollout that are not finite (``sg.on_nonfinite=skip``).

A response whose log-probs are not finite is masked alone: its reward is finite, and counts in the
mean and standard deviation of its group. A reward that is not finite masks the whole group, as
these statistics are taken over all responses to a prompt.

A masked response stays in its batch, so that shapes and numbers of micro-batches stay; its tokens
count in no mean of the loss.
"""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.algo.nonfinite import mean_of_finite, rows_not_finite
from sg_rlhf.overlay.learner import nonfinite

REWARD = "reward"
#: Cause -> field of an experience. The first cause of a sample is the one that is logged.
_FIELDS = {
    REWARD: "rewards",
    "log-probs of the policy": "action_log_probs",
    "log-probs of the reference model": "base_action_log_probs",
    "the KL to the reference model": "kl",
    "log-probs of the rollout engine": "rollout_log_probs",
}


def mask_nonfinite(experiences: list[Experience], group: int) -> list[dict[str, Any]]:
    """Mask the samples that are not finite, before advantages are computed.

    Args:
        experiences: the rollout in batches of any size, with ``index``; changed in place. A reward
            that is not finite becomes the mean of the finite ones, which keeps the rollout's mean.
        group: responses per prompt.

    Returns:
        A row of ``nonfinite.jsonl`` for each cause.
    """
    masked: set[int] = set()
    rows = []
    for cause, name in _FIELDS.items():
        bad = {i for e in experiences for i in _indices_not_finite(e, name)} - masked
        if not bad:
            continue
        prompts = {i // group for i in bad}
        added = bad
        if cause == REWARD:
            added = {prompt * group + i for prompt in prompts for i in range(group)}
        masked |= added
        message = f"{len(bad)} responses have a value that is not finite"
        rows.append(nonfinite.masked_row(cause, message, prompts, len(added)))
    if masked:
        mean = mean_of_finite(torch.cat([e.rewards.flatten() for e in experiences]))
        for experience in experiences:
            mask_samples(experience, torch.tensor([i in masked for i in experience.index]), mean)
    return rows


def _indices_not_finite(experience: Experience, name: str) -> list[int]:
    values = getattr(experience, name)
    if values is None:
        return []
    mask_BT = None if name == "rewards" else experience.action_mask
    return list(itertools.compress(experience.index, rows_not_finite(values, mask_BT).tolist()))


def mask_samples(experience: Experience, rows: torch.Tensor, mean_reward: float) -> None:
    """Mask samples of an experience, and replace their non-finite values.

    Upstream multiplies values by the mask, and NaN times 0 is NaN.

    Args:
        experience: of B samples; changed in place.
        rows: bool [B], the samples to mask.
        mean_reward: replaces a reward that is not finite.
    """
    if not rows.any():
        return
    for field in fields(Experience):
        value = getattr(experience, field.name)
        if not torch.is_tensor(value):
            continue
        if field.name == "action_mask":
            value = value.masked_fill(rows[:, None], 0)
        elif Experience.is_step_tensor_field(field.name) and value.is_floating_point():
            value = value.masked_fill(rows[:, None], 0.0)
        elif Experience.is_episode_tensor_field(field.name):
            value = _finite_or(mean_reward if field.name == "rewards" else 0.0, value)
        setattr(experience, field.name, value)
    for key, value in experience.info.items():
        if torch.is_tensor(value):
            experience.info[key] = _finite_or(mean_reward if key == "reward" else 0.0, value)


def _finite_or(default: float, values: torch.Tensor) -> torch.Tensor:
    if not values.is_floating_point():
        return values
    return torch.where(torch.isfinite(values), values, default)
