"""GRPO-SG in torchtitan (0.3.0, ``experiments/rl``): a loss class for the trainer's configuration.

In place of ``GRPOLoss.Config(...)`` as ``loss`` of ``PolicyTrainer.Config``::

    loss=GRPOSGLoss.Config(weighting="grpo_sg", parameters={"upper": 1.2})

torchtitan divides the sum over tokens by those of the optimizer step (token-mean). Its old
log-probs are those of the generator; tokens where they are not finite are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import BaseLoss, compute_logprobs

from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import make_weighting


class GRPOSGLoss(BaseLoss):
    """The loss of sg_rlhf with torchtitan's signature."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """As :class:`~sg_rlhf.algo.policy_loss.LossSettings`; the mean is torchtitan's."""

        weighting: str = "grpo_sg"
        parameters: dict[str, Any] = field(default_factory=dict)
        objective: str = "ppo"
        eps_low: float = 0.2
        eps_high: float = 0.24
        dual_clip: float | None = None

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.settings = LossSettings(
            make_weighting(config.weighting, config.parameters),
            config.eps_low,
            config.eps_high,
            config.dual_clip,
            config.objective,
        )

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        global_valid_tokens: float | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics that add up over ranks); [B, L, V] logits, [B, L] the others."""
        log_probs = compute_logprobs(logits, labels)
        mask = loss_mask & torch.isfinite(generator_logprobs)
        total = max(global_valid_tokens or 1.0, 1.0)
        output = policy_loss(
            log_probs,
            torch.where(mask, generator_logprobs, log_probs.detach()),
            advantages,
            mask,
            self.settings,
            total=total,
        )
        share = mask.sum() / total
        means = {f"sg/{k}": output.statistics.mean(k) for k in ("weight_mean", "clip_ratio")}
        metrics = {name: value * share for name, value in means.items()}
        return output.loss, {"loss/mean": output.loss.detach(), **metrics}
