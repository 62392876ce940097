"""GRPO-SG in TRL (1.16.0): ``GRPOTrainer`` with a token weighting and an objective.

TRL has no hook for its loss. Its own ``_compute_loss`` runs here with every advantage 0. What is
left are the KL, entropy and router terms, as TRL scales them, and the policy loss of
:mod:`sg_rlhf.algo.policy_loss` is added. With the weighting ``uniform`` the loss is TRL's.

TRL's advantages are used, but equal rewards give exactly 0, where TRL gives rounding errors.

================================  =============================================================
TRL (``GRPOConfig``)              here
================================  =============================================================
epsilon, epsilon_high             eps_low, eps_high
loss_type dapo, bnpo, dr_grpo     mean over tokens, divided by TRL's number of tokens
loss_type grpo                    mean over responses (seq-mean)
loss_type cispo, sapo             refused: ``objective="cispo"`` or ``"sapo"`` with loss_type dapo
delta                             refused: ``dual_clip`` limits the ratio where A < 0
top_entropy_quantile              refused: ``weighting="top_entropy"``
beta                              the weight of TRL's KL; ``weighted_kl`` multiplies it by w
use_vllm and its correction       factor of each token's loss (coefficient)
================================  =============================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from sg_rlhf.algo.advantages import equal_rewards
from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.analysis.token_statistics import TokenStatistics
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import TokenContext, Weighting, make_weighting
from sg_rlhf.integrations import METRICS


class GRPOSGTrainer(GRPOTrainer):
    """``GRPOTrainer`` with the loss of sg_rlhf.

    Args:
        *args: those of ``GRPOTrainer``.
        weighting: the token weighting, or its name for default parameters.
        objective: the objective's name.
        dual_clip: see :func:`~sg_rlhf.algo.policy_loss.policy_loss`.
        weighted_kl: multiply the KL of each token by its weight (Lemma 3.4 of arXiv 2511.00066).
        **kwargs: those of ``GRPOTrainer``.

    Raises:
        ValueError: a setting of TRL that this loss does not have.
    """

    def __init__(
        self,
        *args: Any,
        weighting: str | Weighting = "grpo_sg",
        objective: str = "ppo",
        dual_clip: float | None = None,
        weighted_kl: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.weighting = make_weighting(weighting)
        self.objective, self.dual_clip, self.weighted_kl = objective, dual_clip, weighted_kl
        self._rewards: Tensor | None = None
        self._scored: tuple[Tensor, Tensor | None] | None = None
        for name, value, expected in (
            ("loss_type", self.loss_type, ("dapo", "grpo", "bnpo", "dr_grpo")),
            ("importance_sampling_level", self.importance_sampling_level, ("token",)),
            ("delta", self.args.delta, (None,)),
            ("off_policy_mask_threshold", self.off_policy_mask_threshold, (None,)),
            ("top_entropy_quantile", self.top_entropy_quantile, (1.0,)),
        ):
            if value not in expected:
                raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, expected))}")

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._scored = result[:2]
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        outputs = super()._generate_and_score_completions(inputs)
        advantages = outputs["advantages"]
        start = self.accelerator.process_index * len(advantages)
        equal = self._equal_rewards()[start : start + len(advantages)]
        outputs["advantages"] = advantages.masked_fill(equal, 0.0)
        return outputs

    def _equal_rewards(self) -> Tensor:
        """bool [all completions]: those of groups whose advantages TRL makes of rounding errors."""
        rewards, self._rewards = self._rewards, None
        assert rewards is not None
        mode = "train" if self.model.training else "eval"
        group = self.num_generations if mode == "train" else self.num_generations_eval
        if self.multi_objective_aggregation == "normalize_then_sum":
            # Normalised once more over the batch: only a batch without any signal has none.
            of_groups = equal_rewards(
                rewards.T.reshape(-1, group), ~rewards.T.reshape(-1, group).isnan()
            )
            return of_groups.all().expand(len(rewards))
        totals = (rewards * self.reward_weights.to(rewards.device)).nansum(1).view(-1, group)
        counts = ~rewards.isnan().all(1).view(-1, group)
        return equal_rewards(totals, counts).expand_as(totals).flatten()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        advantages = inputs["advantages"]
        others = super()._compute_loss(
            model, {**inputs, "advantages": torch.zeros_like(advantages)}
        )
        assert self._scored is not None
        (log_probs, entropy), self._scored = self._scored, None
        old_log_probs = inputs.get("old_per_token_logps")
        old_log_probs = log_probs.detach() if old_log_probs is None else old_log_probs
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        aggregation = "seq-mean" if self.loss_type == "grpo" else "token-mean"
        total = self._total(inputs, mask)
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        output = policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            mask,
            LossSettings(
                self.weighting,
                self.epsilon_low,
                self.epsilon_high,
                self.dual_clip,
                self.objective,
                aggregation,
            ),
            total=total,
            coefficient=inputs["importance_sampling_ratio"] if corrected else None,
            context=TokenContext(
                entropy=entropy, engine_log_probs=inputs.get("sampling_per_token_logps")
            ),
        )
        loss = others + output.loss
        if self.beta != 0.0 and self.weighted_kl:
            # TRL has added the plain KL: this is the rest, (w - 1) KL.
            kl_BT = kl_estimate(log_probs, inputs["ref_per_token_logps"], estimator="k3")
            if self.args.use_bias_correction_kl:
                kl_BT = kl_BT * (log_probs - old_log_probs).exp()
            rest_BT = (output.weights_BT - 1) * kl_BT
            loss = loss + self.beta * aggregate(rest_BT, mask, aggregation, total=total)
        self._log_statistics(output.statistics)
        return loss

    def _total(self, inputs: dict[str, Any], mask: Tensor) -> Tensor | float:
        """What the sum over tokens or responses is divided by, as TRL's ``loss_type`` has it."""
        training = self.model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        if self.loss_type == "grpo":
            return float(len(mask) * steps)
        if self.loss_type == "bnpo":
            return mask.sum().clamp(min=1.0) * steps
        if self.loss_type == "dr_grpo":
            return float(len(mask) * self.max_completion_length * steps)
        tokens: Tensor = inputs["num_items_in_batch"].clamp(min=1.0)
        tokens = tokens / self.accelerator.num_processes
        return tokens * steps / self.args.steps_per_generation if training else tokens

    def _log_statistics(self, statistics: TokenStatistics) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        # TRL counted these with the advantages 0.
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]
        total = TokenStatistics(self.accelerator.reduce(statistics.sums, reduction="sum"))
        for name in METRICS:
            metrics[f"sg/{name}"].append(total.mean(name).item())
