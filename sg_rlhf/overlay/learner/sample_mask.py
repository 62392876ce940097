"""Masks the samples of a rollout that are not finite (``sg.on_nonfinite=skip``).

A response whose log-probs are not finite is masked alone: its reward is finite, and counts in the
mean and standard deviation of its group. A reward that is not finite masks the whole group, as
these statistics are taken over all responses to a prompt.

A masked response stays in its batch, so that shapes and numbers of micro-batches stay; its tokens
count in no mean of the loss.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from openrlhf.trainer.ppo_utils.experience import Experience


def mask_samples(experience: Experience, rows: torch.Tensor, mean_reward: float) -> None:
    """Mask B samples where ``rows`` [B] is true, and replace what is not finite; in place.

    Upstream multiplies values by the mask, and NaN times 0 is NaN. A reward becomes
    ``mean_reward``.
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
