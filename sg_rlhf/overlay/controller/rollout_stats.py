"""Statistics of a rollout's samples: the ``rollout/`` metrics."""

from __future__ import annotations

import torch
from openrlhf.trainer.ppo_utils.experience import Experience


def rollout_stats(experiences: list[Experience], n_samples_per_prompt: int) -> dict[str, float]:
    """Rewards, response lengths, truncation, accuracy and groups without signal.

    ``n_samples_per_prompt`` is 1 if the estimator does not compare the responses to one prompt.
    """
    rewards = torch.cat([e.info["reward"] for e in experiences]).float()
    lengths = torch.cat([e.response_length for e in experiences]).float()
    truncated = torch.cat([e.truncated for e in experiences]).float()
    stats = {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
        "rollout/response_length_mean": lengths.mean().item(),
        "rollout/response_length_max": lengths.max().item(),
        "rollout/truncated_rate": truncated.mean().item(),
        "rollout/num_samples": float(len(rewards)),
    }
    correct = [e.info["correct"] for e in experiences if "correct" in e.info]
    if correct:
        stats["rollout/accuracy"] = torch.cat(correct).float().mean().item()
    if n_samples_per_prompt > 1:
        share = frac_reward_zero_std(experiences, n_samples_per_prompt)
        stats["rollout/frac_reward_zero_std"] = share
    return stats


def frac_reward_zero_std(experiences: list[Experience], n_samples_per_prompt: int) -> float:
    """Share of the prompts whose responses have a ``group_reward_std`` of exactly 0."""
    stds = {
        index // n_samples_per_prompt: std
        for e in experiences
        for index, std in zip(e.index, e.info["group_reward_std"].tolist(), strict=True)
    }
    equal: list[bool] = [std == 0.0 for std in stds.values()]
    return sum(equal) / len(equal)
