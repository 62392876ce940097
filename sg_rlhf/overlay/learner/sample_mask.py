"""Samples of a rollout that are left out of its update (``sg.on_nonfinite=skip``).

A response whose log-probs are not finite is left out alone: its reward is sound, and counts in the
mean and the standard deviation of its group. One whose reward is not finite takes its group along:
these are taken over all responses of a prompt, and over fewer they would be another estimator's.
Upstream's dynamic filtering drops groups whole, too.

A response that is left out stays where it is, so that batches keep their shapes and ranks their
number of passes; its tokens are masked, and count in no mean of the loss.
"""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.algo.nonfinite import mean_of_finite, rows_not_finite
from sg_rlhf.overlay.learner import nonfinite

#: Field of an experience -> whose log-probs it has.
LOG_PROBS = {
    "action_log_probs": "log-probs of the policy",
    "base_action_log_probs": "log-probs of the reference model",
    "kl": "the KL to the reference model",
    "rollout_log_probs": "log-probs of the rollout engine",
}
REWARD = "reward"


def mask_nonfinite(experiences: list[Any], group: int) -> list[dict[str, Any]]:
    """Leave out of a rollout what is not finite, before its advantages are computed.

    Args:
        experiences: of any cut, with ``index``; changed in place. A reward that is not finite
            becomes the mean of those that are, which leaves the rollout's mean as it is.
        group: responses of a prompt.

    Returns:
        A row of ``nonfinite.jsonl`` for each cause.
    """
    bad: dict[str, list[int]] = {REWARD: [], **{cause: [] for cause in LOG_PROBS.values()}}
    prompts: dict[int, str] = {}
    for experience in experiences:
        prompts |= dict(zip(experience.index, experience.prompts, strict=True))
        bad[REWARD] += _places(experience, rows_not_finite(experience.rewards))
        for name, cause in LOG_PROBS.items():
            values = getattr(experience, name)
            if values is not None:
                rows = rows_not_finite(values, experience.action_mask)
                bad[cause] += _places(experience, rows)
    if not any(bad.values()):
        return []
    rewards = torch.cat([experience.rewards.flatten() for experience in experiences])
    mean = mean_of_finite(rewards)
    left_out: set[int] = set()
    found = []
    for cause, places in bad.items():
        # A sample's first cause is the one that is told.
        own = sorted({*places} - left_out)
        also = _groups(own, group) if cause == REWARD else own
        added = {*also} - left_out
        left_out |= added
        if own:
            samples = [nonfinite.sample(place, prompts[place], group) for place in own]
            row = {"optimizer_step": None, "cause": cause, "left_out": len(added)}
            found.append({**row, "samples": samples})
    for experience in experiences:
        mask_samples(experience, torch.tensor([i in left_out for i in experience.index]), mean)
    return found


def _places(experience: Any, rows: torch.Tensor) -> list[int]:
    return list(itertools.compress(experience.index, rows.tolist()))


def _groups(places: list[int], group: int) -> list[int]:
    prompts = {place // group for place in places}
    return [prompt * group + i for prompt in sorted(prompts) for i in range(group)]


def mask_samples(experience: Any, rows: torch.Tensor, mean_reward: float) -> None:
    """Mask samples of an experience, and make finite what upstream multiplies by the mask.

    Args:
        experience: of B samples; changed in place.
        rows: bool [B].
        mean_reward: in the place of a reward that is not finite.
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
            value = _finite(value, mean_reward if field.name == "rewards" else 0.0)
        setattr(experience, field.name, value)
    for key, value in experience.info.items():
        if torch.is_tensor(value):
            experience.info[key] = _finite(value, mean_reward if key == "reward" else 0.0)


def _finite(values: torch.Tensor, otherwise: float) -> torch.Tensor:
    if not values.is_floating_point():
        return values
    return torch.where(torch.isfinite(values), values, otherwise)
