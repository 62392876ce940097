"""Group-relative advantages (GRPO, arXiv 2402.03300; Eq. 4 of arXiv 2511.00066) and their bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Estimators that compare a response with others (OpenRLHF's names).
COMPARING = ("rloo", "reinforce_baseline", "dr_grpo", "group_norm", "flash_reinforce")


def group_advantages(rewards_BG: Tensor, std: str = "sample", eps: float = 1e-9) -> Tensor:
    """A = (reward - mean) / (std + eps) within each row of G responses to one prompt; [B, G].

    ``sample`` divides the squares by G - 1 (what OpenRLHF does), ``population`` by G (what the
    proof of Theorem 3.3 assumes: the squares of a row sum to G). A row of equal rewards gives
    zeros. Raises ``ValueError`` for G < 2 or another std.
    """
    if std not in ("sample", "population"):
        raise ValueError(f"std={std!r}: expected sample or population")
    if rewards_BG.shape[-1] < 2:
        raise ValueError(
            f"group size {rewards_BG.shape[-1]}: expected 2 or more responses per prompt"
        )
    correction = 1 if std == "sample" else 0
    centred_BG = rewards_BG - rewards_BG.mean(-1, keepdim=True)
    return centred_BG / (rewards_BG.std(-1, keepdim=True, correction=correction) + eps)


def population_std_correction(group_size: int) -> float:
    """sqrt(G / (G - 1)): times this, an advantage by sample std is the one by population std.

    1.0690 for G = 8. The two differ by eps besides, 1e-9 of the std. ``ValueError`` for G < 2.
    """
    if group_size < 2:
        raise ValueError(f"group_size={group_size!r}: expected 2 or more")
    return math.sqrt(group_size / (group_size - 1))


def compared_rewards(
    rewards_BG: Tensor,
    counts_BG: Tensor,
    estimator: str,
    std: str = "sample",
    eps: float = 1e-9,
) -> Tensor:
    """Each reward minus its baseline, over the responses that count; [B, G], 0 for all others.

    With n responses of a prompt that count, m their mean and s their standard deviation:
    ``reinforce_baseline`` and ``dr_grpo`` give r - m, ``rloo`` gives (r - m) n / (n - 1), which is
    r minus the mean of the others, ``group_norm`` gives (r - m) / (s + eps), and
    ``flash_reinforce`` gives r minus the mean of the whole batch. Where all count these are
    OpenRLHF's. A response that counts alone gives 0, except with ``flash_reinforce``.

    Args:
        rewards_BG: G responses to each prompt; those that do not count may hold anything.
        counts_BG: bool.
        estimator: one of :data:`COMPARING`.
        std: of ``group_norm``: ``sample`` (n - 1) or ``population`` (n).
        eps: of ``group_norm``.
    """
    if estimator not in COMPARING:
        raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(COMPARING)}")
    rewards_BG = torch.where(counts_BG, rewards_BG, 0.0)
    if estimator == "flash_reinforce":
        mean = rewards_BG.sum() / counts_BG.sum().clamp(min=1)
        return torch.where(counts_BG, rewards_BG - mean, 0.0)
    n_B1 = counts_BG.sum(-1, keepdim=True)
    mean_B1 = rewards_BG.sum(-1, keepdim=True) / n_B1.clamp(min=1)
    centred_BG = torch.where(counts_BG, rewards_BG - mean_B1, 0.0)
    if estimator == "rloo":
        return centred_BG * n_B1 / (n_B1 - 1).clamp(min=1)
    if estimator == "group_norm":
        return centred_BG / (counted_std(rewards_BG, counts_BG, std) + eps)
    return centred_BG


def counted_std(rewards_BG: Tensor, counts_BG: Tensor, std: str = "sample") -> Tensor:
    """Standard deviation of the rewards that count of each prompt; [B, 1], 0 for fewer than two."""
    n_B1 = counts_BG.sum(-1, keepdim=True)
    mean_B1 = torch.where(counts_BG, rewards_BG, 0.0).sum(-1, keepdim=True) / n_B1.clamp(min=1)
    squares_B1 = torch.where(counts_BG, rewards_BG - mean_B1, 0.0).square().sum(-1, keepdim=True)
    return (squares_B1 / (n_B1 - int(std == "sample")).clamp(min=1)).sqrt()


def max_surrogate(eps_high: float, group_size: int) -> float:
    """L = (1 + eps_high) * sqrt(G), the constant of Theorem 3.3 (arXiv 2511.00066).

    Bounds the surrogate from above for population-std advantages and a weight inside the clip. It
    does not bound it from below: a token with A < 0 and a large w * r has min(w r A, clip(w r) A)
    = w r A, which has no limit unless dual clip sets one, max(1 + eps_high, dual_clip) * sqrt(G).
    """
    return (1 + eps_high) * math.sqrt(group_size)
