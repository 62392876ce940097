"""The advantages of a rollout, from the rewards of its responses."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Sequence

import torch
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties
from torch import Tensor

from sg_rlhf.algo.advantages import COMPARING, compared_rewards, counted_std, level_equal


def add_advantages(
    experiences: list[Experience],
    has_tokens: Sequence[Tensor],
    args: Namespace,
    kl_coefficient: float,
) -> None:
    """Add ``advantages`` and ``returns`` [B, T]; ``info`` gets ``group_reward_std``, ``return``.

    Equal rewards give exactly 0 (:func:`sg_rlhf.algo.advantages.level_equal`). With
    ``sg.advantage_std=population`` ``group_norm`` is the paper's Eq. 4. The reward of a response
    without a token (``has_tokens``) does not count in the statistics of its group.
    """
    for e in experiences:
        e.rewards = e.rewards.to(torch.promote_types(e.rewards.dtype, torch.float32))
    apply_length_penalties(experiences, args)
    settings, group = args.algo.advantage, args.rollout.n_samples_per_prompt
    estimator = settings.estimator
    # OpenRLHF reads gamma with `reinforce` alone.
    gamma = settings.gamma if estimator == "reinforce" else 1.0
    rewards_PG = _by_prompt(experiences, [e.rewards for e in experiences], group)
    counts_PG = _by_prompt(experiences, has_tokens, group)
    stds_PG = counted_std(rewards_PG, counts_PG).expand_as(rewards_PG)
    if estimator in COMPARING:
        rewards_PG = compared_rewards(rewards_PG, counts_PG, estimator, args.sg.advantage_std)
    elif gamma == 1.0:  # with another, equal rewards give each position another return
        rewards_PG = level_equal(rewards_PG.view(1, -1), counts_PG.view(1, -1))
    for e, rewards_B, stds_B in zip(
        experiences,
        _by_experience(experiences, rewards_PG),
        _by_experience(experiences, stds_PG),
        strict=True,
    ):
        if group > 1:
            e.info["group_reward_std"] = stds_B
        rewards_BT = compute_reward(
            rewards_B, kl_coefficient, e.kl, e.action_mask, args.reward.clip_range
        )
        e.returns = discounted_returns(rewards_BT, e.action_mask, gamma)
        e.advantages = e.returns.clone()
        e.info["return"] = rewards_BT.sum(dim=-1)
        e.kl = None
    if estimator in ("reinforce", "reinforce_baseline"):
        _normalise(experiences, with_std=not settings.no_std_norm)


def discounted_returns(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over the response tokens: [B, T]."""
    rewards_BT = mask_BT * rewards_BT
    returns_BT = torch.zeros_like(rewards_BT)
    later_B = torch.zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        later_B = rewards_BT[:, t] + gamma * later_B
        returns_BT[:, t] = later_B
    return returns_BT


def _normalise(experiences: list[Experience], with_std: bool) -> None:
    """Subtract the mean over all response tokens of the rollout, and divide by their std."""
    values = torch.cat([e.advantages.flatten() for e in experiences]).float()
    mask = torch.cat([e.action_mask.flatten() for e in experiences])
    count = mask.sum()
    mean = (values * mask).sum() / count
    scale: Tensor | float = 1.0
    if with_std:
        scale = (((values - mean).pow(2) * mask).sum() / count).clamp(min=1e-8).rsqrt()
    for e in experiences:
        e.advantages = (e.advantages - mean) * scale


def _indices(experiences: list[Experience]) -> Tensor:
    return torch.tensor(list(itertools.chain.from_iterable(e.index for e in experiences)))


def _by_prompt(experiences: list[Experience], values: Sequence[Tensor], group: int) -> Tensor:
    """Values [B] of each experience, in the order of the rollout: [P, G]."""
    return torch.cat(list(values))[_indices(experiences).argsort()].view(-1, group)


def _by_experience(experiences: list[Experience], values_PG: Tensor) -> Sequence[Tensor]:
    """The reverse of :func:`_by_prompt`."""
    sizes = [len(e.index) for e in experiences]
    return torch.split(values_PG.flatten()[_indices(experiences)], sizes)
