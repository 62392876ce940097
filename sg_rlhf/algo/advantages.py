"""Group-relative advantages (GRPO, arXiv 2402.03300; Eq. 4 of arXiv 2511.00066)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Estimators that compare a response with the others to its prompt (OpenRLHF's names).
WITHIN_PROMPTS = ("rloo", "reinforce_baseline", "dr_grpo", "group_norm")
#: Estimators that compare a response with others.
COMPARING = (*WITHIN_PROMPTS, "flash_reinforce")
#: Rewards of a group are equal if they differ by no more than this many roundings of the largest.
ROUNDINGS = 4


def equal_rewards(rewards_BG: Tensor, counts_BG: Tensor | None = None) -> Tensor:
    """Bool [B, 1]: whether all rewards of a prompt that count are equal, except for rounding.

    True with fewer than two that count, false with a NaN. Without ``counts_BG`` all count.
    """
    counts_BG = torch.ones_like(rewards_BG, dtype=torch.bool) if counts_BG is None else counts_BG
    highest_B1 = torch.where(counts_BG, rewards_BG, -math.inf).amax(-1, keepdim=True)
    lowest_B1 = torch.where(counts_BG, rewards_BG, math.inf).amin(-1, keepdim=True)
    largest_B1 = torch.where(counts_BG, rewards_BG.abs(), 0.0).amax(-1, keepdim=True)
    # bf16 has so few digits that neighbours are different rewards.
    eps = min(torch.finfo(rewards_BG.dtype).eps, torch.finfo(torch.float32).eps)
    return highest_B1 - lowest_B1 <= ROUNDINGS * eps * largest_B1


def level_equal(rewards_BG: Tensor, counts_BG: Tensor | None = None) -> Tensor:
    """The rewards [B, G], with 0 for those of a prompt whose rewards are all equal.

    Advantages depend on differences within a prompt. The mean of eight rewards of 0.9 is not 0.9 in
    float32: the differences are 6e-8, and a division by their standard deviation gives 0.9. The
    differences of zeros are exactly 0.
    """
    return torch.where(equal_rewards(rewards_BG, counts_BG), 0.0, rewards_BG)


def group_advantages(rewards_BG: Tensor, std: str = "sample", eps: float = 1e-9) -> Tensor:
    """Advantages of the responses to each prompt: A = (reward - mean) / (std + eps).

    GRPO, arXiv 2402.03300; Eq. 4 of arXiv 2511.00066. A row of equal rewards gives exact zeros
    (:func:`level_equal`).

    Args:
        rewards_BG: [B, G], rewards of the G responses to each of B prompts.
        std: ``sample`` divides the sum of squares by G - 1, as OpenRLHF does. ``population``
            divides by G, as the proof of Theorem 3.3 assumes: the squares of a row then sum to G.

    Returns:
        [B, G].

    Raises:
        ValueError: G < 2, or another std.
    """
    if std not in ("sample", "population"):
        raise ValueError(f"std={std!r}: expected sample or population")
    if rewards_BG.shape[-1] < 2:
        raise ValueError(
            f"group size {rewards_BG.shape[-1]}: expected 2 or more responses per prompt"
        )
    correction = 1 if std == "sample" else 0
    rewards_BG = level_equal(rewards_BG)
    centred_BG = rewards_BG - rewards_BG.mean(-1, keepdim=True)
    return centred_BG / (rewards_BG.std(-1, keepdim=True, correction=correction) + eps)


def compared_rewards(
    rewards_BG: Tensor,
    counts_BG: Tensor,
    estimator: str,
    std: str = "sample",
    eps: float = 1e-9,
) -> Tensor:
    """Each reward minus its baseline, over the responses that count.

    With n counted responses r of a prompt, their mean m and their standard deviation s::

        reinforce_baseline, dr_grpo:   r - m
        rloo:                          r - mean of the other responses
        group_norm:                    (r - m) / (s + eps)
        flash_reinforce:               r - mean of the whole batch

    If all responses count, these are OpenRLHF's, bit for bit. A prompt whose counted responses have
    equal rewards gives exactly 0, and so does one with a single counted response; with
    ``flash_reinforce`` only a batch whose rewards are all equal does.

    Args:
        rewards_BG: [B, G], rewards of G responses to each prompt; those that do not count may hold
            anything.
        counts_BG: bool [B, G], which responses count.
        std: for ``group_norm``: ``sample`` (divides by n - 1) or ``population`` (by n).
        eps: for ``group_norm``, added to s.

    Returns:
        [B, G]; 0 for responses that do not count.

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator not in COMPARING:
        raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(COMPARING)}")
    rewards_BG = torch.where(counts_BG, rewards_BG, 0.0)
    if estimator == "flash_reinforce":
        rewards_BG = level_equal(rewards_BG.reshape(1, -1), counts_BG.reshape(1, -1)).view_as(
            rewards_BG
        )
        mean = rewards_BG.sum() / counts_BG.sum().clamp(min=1)
        return torch.where(counts_BG, rewards_BG - mean, 0.0)
    rewards_BG = level_equal(rewards_BG, counts_BG)
    n_B1 = counts_BG.sum(-1, keepdim=True)
    mean_B1 = rewards_BG.sum(-1, keepdim=True) / n_B1.clamp(min=1)
    centred_BG = torch.where(counts_BG, rewards_BG - mean_B1, 0.0)
    if estimator == "rloo":
        others_B1 = (rewards_BG.sum(-1, keepdim=True) - rewards_BG) / (n_B1 - 1).clamp(min=1)
        return torch.where(counts_BG, rewards_BG - others_B1, 0.0)
    if estimator == "group_norm":
        return centred_BG / (counted_std(rewards_BG, counts_BG, std) + eps)
    return centred_BG


def counted_std(rewards_BG: Tensor, counts_BG: Tensor, std: str = "sample") -> Tensor:
    """Standard deviation [B, 1] of a prompt's counted rewards, by n - 1 or n; 0 if equal."""
    rewards_BG = level_equal(rewards_BG, counts_BG)
    if bool(counts_BG.all()) and rewards_BG.shape[-1] > 1:
        return rewards_BG.std(-1, keepdim=True, correction=int(std == "sample"))
    n_B1 = counts_BG.sum(-1, keepdim=True)
    mean_B1 = torch.where(counts_BG, rewards_BG, 0.0).sum(-1, keepdim=True) / n_B1.clamp(min=1)
    squares_B1 = torch.where(counts_BG, rewards_BG - mean_B1, 0.0).square().sum(-1, keepdim=True)
    return (squares_B1 / (n_B1 - int(std == "sample")).clamp(min=1)).sqrt()
