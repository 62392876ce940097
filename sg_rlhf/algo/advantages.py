"""Group-relative advantages (GRPO, arXiv 2402.03300; Eq. 4 of arXiv 2511.00066) and their bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Estimators that compare a response with others (OpenRLHF's names).
COMPARING = ("rloo", "reinforce_baseline", "dr_grpo", "group_norm", "flash_reinforce")


def group_advantages(rewards_BG: Tensor, std: str = "sample", eps: float = 1e-9) -> Tensor:
    """Advantages of the responses to each prompt: A = (reward - mean) / (std + eps).

    GRPO, arXiv 2402.03300; Eq. 4 of arXiv 2511.00066. A row of equal rewards gives zeros.

    Args:
        rewards_BG: [B, G], rewards of the G responses to each of B prompts.
        std: ``sample`` divides the sum of squares by G - 1, as OpenRLHF does. ``population``
            divides by G, as the proof of Theorem 3.3 assumes: the squares of a row then sum to G.
        eps: added to the standard deviation.

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
    centred_BG = rewards_BG - rewards_BG.mean(-1, keepdim=True)
    return centred_BG / (rewards_BG.std(-1, keepdim=True, correction=correction) + eps)


def population_std_correction(group_size: int) -> float:
    """sqrt(G / (G - 1)), the factor from an advantage by sample std to one by population std.

    1.0690 for G = 8. It ignores ``eps``, which is 1e-9 of the standard deviation.

    Args:
        group_size: G, responses per prompt.

    Raises:
        ValueError: G < 2.
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
    """Each reward minus its baseline, over the responses that count.

    With n counted responses r of a prompt, their mean m and their standard deviation s::

        reinforce_baseline, dr_grpo:   r - m
        rloo:                          (r - m) n / (n - 1)    = r - mean of the other responses
        group_norm:                    (r - m) / (s + eps)
        flash_reinforce:               r - mean of the whole batch

    If all responses count, these are OpenRLHF's. A prompt with a single counted response gives 0,
    except with ``flash_reinforce``.

    Args:
        rewards_BG: [B, G], rewards of G responses to each prompt; those that do not count may hold
            anything.
        counts_BG: bool [B, G], which responses count.
        estimator: one of :data:`COMPARING`.
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
    """Standard deviation of the counted rewards of each prompt.

    Args:
        rewards_BG: [B, G].
        counts_BG: bool [B, G], which rewards count.
        std: ``sample`` or ``population``.

    Returns:
        [B, 1]; 0 for prompts with fewer than two counted rewards.
    """
    n_B1 = counts_BG.sum(-1, keepdim=True)
    mean_B1 = torch.where(counts_BG, rewards_BG, 0.0).sum(-1, keepdim=True) / n_B1.clamp(min=1)
    squares_B1 = torch.where(counts_BG, rewards_BG - mean_B1, 0.0).square().sum(-1, keepdim=True)
    return (squares_B1 / (n_B1 - int(std == "sample")).clamp(min=1)).sqrt()


def max_surrogate(eps_high: float, group_size: int) -> float:
    """L = (1 + eps_high) sqrt(G), the constant of Theorem 3.3 (arXiv 2511.00066).

    It bounds the surrogate from above, for advantages by population std and a weight inside the
    clip. No such advantage exceeds sqrt(G - 1), so the bound is not tight. It is no lower bound:
    with A < 0 and a large w r, min(w r A, clip(w r) A) = w r A is unlimited, unless dual clip
    limits it to max(1 + eps_high, dual_clip) sqrt(G).

    Args:
        eps_high: upper clip range.
        group_size: G, responses per prompt.
    """
    return (1 + eps_high) * math.sqrt(group_size)
