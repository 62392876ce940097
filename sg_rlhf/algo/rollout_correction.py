"""Importance correction for the mismatch between the training policy and the rollout engine.

The engine that samples and the trainer that scores compute slightly different probabilities for the
same weights. The factor pi_train / pi_rollout of each token corrects for it, within limits. Same
results as OpenRLHF 0.11.2, bit for bit; background: https://fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sg_rlhf.algo.aggregation import aggregate

_PROB_FLOOR = 1e-6  # keeps the logarithms of the binary KL finite
_MASKED_LOG_PROB = -1.0  # not 0: in bfloat16 the floor does not keep p = 1 away from 1


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Settings of the correction; the defaults are OpenRLHF's.

    Attributes:
        level: ``off``, ``token`` or ``seq``: what is compared with the threshold as one unit.
        mode: ``mask`` drops a unit outside the threshold, ``clip`` limits its ratio.
        gating: the statistic that is compared: ``ratio``, ``binary_kl`` or ``tv``.
        threshold: (low, high).

    Raises:
        ValueError: an unknown value, or settings that cannot be combined.
    """

    level: str = "off"
    mode: str = "mask"
    gating: str = "ratio"
    threshold: tuple[float, float] = (0.5, 5.0)

    def __post_init__(self) -> None:
        choices = {
            "level": ("off", "token", "seq"),
            "mode": ("mask", "clip"),
            "gating": ("ratio", "binary_kl", "tv"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(
                    f"{key}={getattr(self, key)!r}: expected one of {', '.join(allowed)}"
                )
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            raise ValueError(
                f"mode='clip': expected level=token and gating=ratio, "
                f"got level={self.level} and gating={self.gating}"
            )
        if self.gating != "ratio" and self.level != "off" and self.threshold[0] > 0:
            raise ValueError(
                f"threshold={tuple(self.threshold)}: expected a low end of 0 with "
                f"gating={self.gating}, a divergence is only limited from above"
            )


@torch.no_grad()
def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor | None,
    response_mask: Tensor,
    cfg: RolloutCorrectionConfig,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Coefficient of each token's loss that corrects for the engine's other probabilities.

    With r = exp(old - rollout) and the statistic s, which is r, its geometric mean over a response
    (level ``seq``), or a divergence between the two probabilities::

        mask:   r if low <= s <= high, else 0
        clip:   s limited to [low, high]

    Args:
        old_log_probs: [B, T], log-probs of the policy that sampled, as the trainer computes them.
        rollout_log_probs: [B, T], the same as the rollout engine computed them; None only with
            level ``off``.
        response_mask: [B, T], 1 or True on response tokens.

    Returns:
        ``(coefficient, metrics)``: [B, T] without a gradient, for ``coefficient`` of the policy
        loss, and the scalars ``vllm_kl`` (masked mean of rollout - old) and ``is_filter_ratio``
        (share of units outside the threshold). With level ``off``: ``(None, {})``. A response
        without tokens counts as outside at level ``seq``, as upstream has it.

    Raises:
        ValueError: no ``rollout_log_probs``.
    """
    if cfg.level == "off":
        return None, {}
    if rollout_log_probs is None:
        raise ValueError(f"rollout_log_probs=None: expected a tensor with level={cfg.level}")
    masked_BT = response_mask == 0
    old_BT = old_log_probs.masked_fill(masked_BT, _MASKED_LOG_PROB)
    rollout_BT = rollout_log_probs.masked_fill(masked_BT, _MASKED_LOG_PROB)
    low, high = cfg.threshold
    log_ratio_BT = old_BT - rollout_BT
    statistic = _statistic(old_BT, rollout_BT, log_ratio_BT, response_mask, cfg)
    if cfg.mode == "clip":
        coef_BT = statistic.clamp(min=low, max=high)
        outside = (statistic < low) | (statistic > high)
    else:
        inside = (statistic >= low) & (statistic <= high)
        coef_BT = torch.where(inside, log_ratio_BT.exp(), 0.0)
        outside = ~inside
    by_token = cfg.level == "token"
    share = aggregate(outside.float(), response_mask) if by_token else outside.float().mean()
    vllm_kl = aggregate(rollout_BT - old_BT, response_mask)
    return coef_BT, {"vllm_kl": vllm_kl, "is_filter_ratio": share}


def _statistic(
    old_BT: Tensor,
    rollout_BT: Tensor,
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    cfg: RolloutCorrectionConfig,
) -> Tensor:
    """What the threshold is compared with: [B, T] at level token, [B, 1] at level seq."""
    per_response = cfg.level == "seq"
    if cfg.gating == "ratio":
        return (_response_mean(log_ratio_BT, mask_BT) if per_response else log_ratio_BT).exp()
    p_BT = rollout_BT.exp().clamp(_PROB_FLOOR, 1 - _PROB_FLOOR)
    q_BT = old_BT.exp().clamp(_PROB_FLOOR, 1 - _PROB_FLOOR)
    if cfg.gating == "binary_kl":
        divergence_BT = p_BT * (p_BT / q_BT).log() + (1 - p_BT) * ((1 - p_BT) / (1 - q_BT)).log()
    else:
        divergence_BT = (p_BT - q_BT).abs()
    return _response_mean(divergence_BT, mask_BT) if per_response else divergence_BT


def _response_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, 1]; NaN for a response without tokens, which every threshold then excludes."""
    return ((values_BT * mask_BT).sum(dim=-1) / mask_BT.sum(dim=-1)).unsqueeze(-1)
