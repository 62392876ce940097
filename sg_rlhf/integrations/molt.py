"""GRPO-SG in Molt (0.2.1, OpenRLHF's successor; on PyPI as molt-rl): a loss in its registry.

Importing this module registers ``grpo_sg``, which ``molt.models.PolicyLoss(loss_mode="grpo_sg")``
finds. Molt's command line takes no other name than its own three. So :func:`replace_ppo` puts the
loss in the place of ``ppo``, as a hook of Ray's in each of Molt's processes::

    hook='{"worker_process_setup_hook": "sg_rlhf.integrations.molt.replace_ppo"}'
    ray job submit --runtime-env-json "$hook" -- python -m molt.cli.train_rl_ray ...

==============================  =========================================================
Molt                            here
==============================  =========================================================
actor.eps_clip_low_high         eps_low, eps_high
actor.dual_clip                 dual_clip
actor.loss_agg_mode             Molt's own ``agg_loss``, in all its modes
algo.advantage.is_correction_*  Molt's own factor of each token's loss
algo.kl.use_loss                Molt's own KL, without the token weight
==============================  =========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from molt.models.loss import POLICY_LOSSES, register_policy_loss
from torch import Tensor

from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import Weighting, make_weighting


def register(
    name: str, weighting: str | Weighting = "grpo_sg", objective: str = "ppo"
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register a policy loss, with a weighting and an objective, as ``loss_mode=NAME``."""
    cfg = make_weighting(weighting)

    @register_policy_loss(name)
    def loss(
        ratio: Tensor,
        advantages: Tensor,
        log_probs: Tensor,
        action_mask: Tensor,
        *,
        clip_eps_low: float,
        clip_eps_high: float,
        dual_clip: float | None,
        policy_log_ratio: Tensor,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        output = policy_loss(
            log_probs.float(),
            (log_probs.float() - policy_log_ratio).detach(),  # Molt gives no old log-probs
            advantages,
            action_mask,
            LossSettings(cfg, clip_eps_low, clip_eps_high, dual_clip, objective=objective),
        )
        return output.loss_BT, output.statistics.mean("clip_ratio").float()

    return loss


grpo_sg = register("grpo_sg")


def replace_ppo() -> None:
    """Let ``--actor.loss_mode ppo``, the default, mean ``grpo_sg`` in this process."""
    POLICY_LOSSES["ppo"] = grpo_sg
