"""The policy-gradient loss with a weight per token (arXiv 2511.00066, Eq. 13).

A weighting (``sg_rlhf.algo.weightings``) gives w, an objective (``sg_rlhf.algo.objectives``) gives
the surrogate J of each token; the loss is the aggregate of -J. Where w = 1 the objective ``ppo`` is
GRPO (arXiv 2402.03300), equal to OpenRLHF's PolicyLoss bit for bit in the value and the gradient,
up to the sign of a zero gradient at masked positions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from sg_rlhf.algo.aggregation import aggregate, check_aggregation
from sg_rlhf.algo.analysis.gradient_dead_zones import warn_once
from sg_rlhf.algo.analysis.token_statistics import TokenStatistics, token_statistics
from sg_rlhf.algo.objectives import Clip, Objective, Tokens, check_objective, make_objective
from sg_rlhf.algo.token_weights import normalize_weights, unnormalized_weights
from sg_rlhf.algo.weightings import TokenContext, Weighting, make_weighting

_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossSettings:
    """What is the same for every batch of a run. The defaults are the paper's.

    Attributes:
        eps_low: lower clip range, above 0.
        eps_high: upper clip range, above 0.
        dual_clip: None, or a number above 1: a token with A < 0 gives at least dual_clip A (arXiv
            1912.09729). Inside the clip this limits w r A, outside it limits r A before the weight.

    Raises:
        ValueError: an unknown name, dual_clip <= 1, or a weight inside a clip that the objective
            does not have.
    """

    weighting: str | Weighting = "grpo_sg"
    eps_low: float = 0.2
    eps_high: float = 0.24
    dual_clip: float | None = None
    objective: str | Objective = "ppo"
    aggregation: str = "token-mean"

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip={self.dual_clip!r}: expected a number above 1, or None")
        check_aggregation(self.aggregation)
        weighting, objective = make_weighting(self.weighting), make_objective(self.objective)
        check_objective(objective, weighting)
        object.__setattr__(self, "weighting", weighting)
        object.__setattr__(self, "objective", objective)


@dataclass(frozen=True)
class LossOutput:
    """The result of :func:`policy_loss`.

    Attributes:
        loss_BT: [B, T], -coefficient J before the aggregation, with a gradient; 0 at masked tokens.
        weights_BT: [B, T], the token weights w, without a gradient.
        statistics: sums over the tokens, additive over micro-batches and ranks;
            ``statistics.metrics()`` has the metrics of this batch by name.
    """

    loss: Tensor
    loss_BT: Tensor
    weights_BT: Tensor
    statistics: TokenStatistics


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    settings: LossSettings | None = None,
    *,
    total: Tensor | float | None = None,
    prompt_tokens: Tensor | None = None,
    coefficient: Tensor | None = None,
    active: Tensor | None = None,
    context: TokenContext | None = None,
) -> LossOutput:
    """Loss, token weights and statistics of one micro-batch.

    With the ratio r = exp(log_probs - old_log_probs), the difference limited to [-20, 20], the
    weight w of the weighting and the objective ``ppo``::

        inside the clip (Eq. 13):   J = min(w r A, clip(w r, 1 - eps_low, 1 + eps_high) A)
        outside the clip:           J = w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
        loss = aggregate(-coefficient J)

    w is constant in the gradient, unless ``weighting.stop_gradient`` is False: then the objective
    is that of Eq. 10 to 12, and a token that is not clipped has the gradient (w + p dw/dp) r A. w
    is rounded to the dtype of r, so that a bfloat16 loss stays bfloat16. With w = 1 this is
    OpenRLHF 0.11.2's PPO loss bit for bit. Masked positions may hold anything, also NaN: they reach
    neither the loss nor the gradient.

    Args:
        log_probs: [B, T], log-probs of the response tokens under the current policy, with gradient.
        old_log_probs: [B, T], the same under the policy that sampled.
        advantages: [B], one per response, or [B, T].
        response_mask: [B, T], 1 or True on response tokens.
        settings: the settings; None for the paper's.
        total: what the mean divides by: tokens, responses or prompts. With gradient accumulation
            that of the whole optimizer step, so that the losses of its micro-batches add up to the
            loss of one batch. None for that of this batch.
        prompt_tokens: [B], for prompt-mean: the tokens of each response's prompt in the whole
            optimizer step, see :func:`~sg_rlhf.algo.aggregation.prompt_token_counts`.
        coefficient: [B, T], factor of each token's loss without a gradient, as
            :func:`~sg_rlhf.algo.rollout_correction.rollout_correction` gives it; None for 1.
        active: bool [B, T]. Where it is False a response token counts in the denominator but gives
            nothing to the loss, the gradient or the statistics (a pass of
            :mod:`~sg_rlhf.algo.lopti`). None for all tokens.
        context: what else the weighting reads (``weighting.reads``). ``old_log_probs``,
            ``advantages`` and ``eps`` are filled in here.

    Returns:
        The loss, the weights and the statistics; no host synchronisation.

    Raises:
        ValueError: prompt-mean without ``prompt_tokens``.

    Warns:
        DeadZoneWarning: once, if the weight inside the clip leaves some tokens without a gradient.
    """
    settings = settings or LossSettings()
    weighting, objective = make_weighting(settings.weighting), make_objective(settings.objective)
    warn_once(weighting, settings.eps_low, settings.eps_high, settings.dual_clip)
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand_as(log_probs)
    old_log_probs_BT = old_log_probs.masked_fill(response_mask == 0, 0.0)
    context = dataclasses.replace(
        context or TokenContext(),
        old_log_probs=old_log_probs_BT,
        advantages=advantages,
        eps=(settings.eps_low, settings.eps_high),
    )
    raw_weights_BT = unnormalized_weights(log_probs, weighting, response_mask, context=context)
    weights_BT = normalize_weights(raw_weights_BT, weighting, response_mask, context=context)
    # This fill keeps masked values out of the gradient, those of `aggregate` out of the value.
    log_ratio_BT = (log_probs - old_log_probs).masked_fill(response_mask == 0, 0.0)
    ratio_BT = log_ratio_BT.clamp(min=-_LOG_RATIO_LIMIT, max=_LOG_RATIO_LIMIT).exp()

    clip = Clip(
        settings.eps_low, settings.eps_high, settings.dual_clip, weighting.placement == "inside"
    )
    tokens = Tokens(ratio_BT, weights_BT.to(ratio_BT.dtype), advantages, old_log_probs_BT)
    surrogate = objective.surrogate(tokens, clip)
    weights_BT, raw_weights_BT = weights_BT.detach(), raw_weights_BT.detach()
    loss_BT = -surrogate.value_BT
    if coefficient is not None:
        loss_BT = coefficient * loss_BT
    counted_BT = response_mask
    if active is not None:
        loss_BT = loss_BT.masked_fill(~active, 0.0)
        counted_BT = (response_mask != 0) & active
    loss = aggregate(
        loss_BT, response_mask, settings.aggregation, total=total, prompt_tokens=prompt_tokens
    )
    with torch.no_grad():
        current_BT = log_probs.detach().masked_fill(response_mask == 0, 0.0)
        on_policy = objective.surrogate(
            Tokens(torch.ones_like(ratio_BT), tokens.weights_BT.detach(), advantages, current_BT),
            clip,
        )
        statistics = token_statistics(
            mask_BT=counted_BT,
            probs_BT=log_probs.double().clamp(max=0.0).exp(),
            log_ratio_BT=log_ratio_BT,
            advantages_BT=advantages,
            weights_BT=weights_BT,
            raw_weights_BT=raw_weights_BT,
            weight_bounds=weighting.bounds(),
            clipped_BT=surrogate.clipped_BT,
            dual_clipped_BT=surrogate.dual_clipped_BT,
            zeroed_BT=surrogate.zeroed_BT | (weights_BT == 0),
            zeroed_at_ratio1_BT=on_policy.zeroed_BT | (weights_BT == 0),
        )
    loss_BT = loss_BT.masked_fill(response_mask == 0, 0.0)
    return LossOutput(loss, loss_BT, weights_BT, statistics)
