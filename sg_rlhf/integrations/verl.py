"""GRPO-SG in verl (0.9.1): a policy loss in its registry.

Importing this module registers ``grpo_sg``. verl imports it in each of its processes::

    VERL_USE_EXTERNAL_MODULES=sg_rlhf.integrations.verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=grpo_sg ...

Other weightings: a module of your own that calls :func:`register`, in that variable's place.

=====================================  ======================================================
verl (``actor_rollout_ref.actor``)     here
=====================================  ======================================================
clip_ratio_low, clip_ratio_high        eps_low, eps_high; clip_ratio where they are null
clip_ratio_c                           dual_clip
loss_agg_mode                          verl's own ``agg_loss``, in all its modes
policy_loss.rollout_correction         factor of each token's loss (coefficient)
use_kl_loss, kl_loss_type              verl's own KL, without the token weight
=====================================  ======================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import Weighting, make_weighting

#: verl's metric -> ours.
_METRICS = {
    "actor/pg_clipfrac": "clip_ratio",
    "actor/pg_clipfrac_lower": "dual_clip_ratio",
    "actor/ppo_kl": "ppo_kl",
    "actor/sg_weight_mean": "weight_mean",
    "actor/sg_zeroed_pos": "zeroed_pos",
    "actor/sg_zeroed_neg": "zeroed_neg",
}


def register(
    name: str, weighting: str | Weighting = "grpo_sg", objective: str = "ppo"
) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Register a policy loss, with a weighting and an objective, as ``loss_mode=NAME``."""
    cfg = make_weighting(weighting)

    @register_policy_loss(name)
    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        low, high = config.clip_ratio_low, config.clip_ratio_high
        output = policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            response_mask,
            LossSettings(
                cfg,
                config.clip_ratio if low is None else low,
                config.clip_ratio if high is None else high,
                config.get("clip_ratio_c", 3.0),
                objective=objective,
            ),
            coefficient=rollout_is_weights,
        )
        value = agg_loss(output.loss_BT, response_mask, loss_agg_mode, **config.global_batch_info)
        metrics = {key: output.statistics.mean(ours).item() for key, ours in _METRICS.items()}
        return value, metrics

    return loss


grpo_sg = register("grpo_sg")
