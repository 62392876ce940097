"""Group-relative advantages (GRPO, arXiv 2402.03300; Eq. 4 of arXiv 2511.00066) and their bound."""

from __future__ import annotations

import math

from torch import Tensor


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


def max_surrogate(eps_high: float, group_size: int) -> float:
    """L = (1 + eps_high) * sqrt(G), the constant of Theorem 3.3 (arXiv 2511.00066).

    Bounds the surrogate from above for population-std advantages and a weight inside the clip. It
    does not bound it from below: a token with A < 0 and a large w * r has min(w r A, clip(w r) A)
    = w r A, which has no limit unless dual clip sets one, max(1 + eps_high, dual_clip) * sqrt(G).
    """
    return (1 + eps_high) * math.sqrt(group_size)
