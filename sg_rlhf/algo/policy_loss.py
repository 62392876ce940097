"""The clipped policy-gradient loss with a weight per token (arXiv 2511.00066, Eq. 13).

Per token, with the clip to [1 - eps_low, 1 + eps_high]:

- ``inside`` (Eq. 13): J = min(w r A, clip(w r) A). A large weight uses up the room of the clip,
  so a token with A > 0 and w > 1 + eps_high has no gradient even at r = 1: the dead zone.
- ``outside``: J = w * min(r A, clip(r) A). The weight scales the gradient and never removes it.

Gradient of J in log pi, the closed forms that the tests check (Lemma 3.4 for ``inside``):

- ``inside``: w r A, but 0 where A > 0 and w r > 1 + eps_high, or A < 0 and w r < 1 - eps_low;
- ``outside``: w r A, but 0 where A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low.

Exactly at a clip boundary the gradient is the full w r A: both branches of the minimum are equal
there, torch gives each half the gradient, and its clamp passes the gradient at both ends. Exactly
at the dual clip's boundary the constant takes its half, so half remains.

Where w = 1 both are GRPO (arXiv 2402.03300), equal to OpenRLHF's PolicyLoss bit for bit in the
value and the gradient, up to the sign of a zero gradient at masked positions.

The objective ``cispo`` (arXiv 2506.13585, Eq. 4) clips the importance weight and keeps every
token's gradient: sg(clip(r)) A log pi, times w. It is computed as J = w * sg(clip(r) / r) * r * A,
which has the same gradient, w clip(r) A, and is GRPO bit for bit where nothing is clipped. The
value differs from the paper's (A log pi there), which no optimizer sees.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.diagnostics import TokenStatistics, token_statistics
from sg_rlhf.algo.shaping import (
    TokenWeightConfig,
    normalize_weights,
    unnormalized_weights,
    weight_bounds,
)
from sg_rlhf.algo.weightings import TokenContext

_LOG_RATIO_LIMIT = 20.0
OBJECTIVES = ("ppo", "cispo")


@dataclass(frozen=True)
class PolicyLossTerms:
    """The scalar to differentiate, the weights (without a gradient) and the additive sums."""

    loss: Tensor
    weights_BT: Tensor
    statistics: TokenStatistics


def sg_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cfg: TokenWeightConfig,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of one micro-batch: ``policy_loss_terms`` with its statistics finalised.

    The metrics are float64 0-d tensors on the CPU, named by ``diagnostics.METRIC_NAMES``, so this
    waits for the device; ``policy_loss_terms`` does not. They describe this
    micro-batch alone; to merge micro-batches or ranks, add ``policy_loss_terms(...).statistics``.
    """
    terms = policy_loss_terms(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        cfg,
        eps_low,
        eps_high,
        dual_clip,
        **options,
    )
    return terms.loss, terms.statistics.metric_tensors()


def policy_loss_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cfg: TokenWeightConfig,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    *,
    token_level_loss: bool = True,
    dp_size: int = 1,
    batch_num_tokens: Tensor | float | None = None,
    global_batch_size: Tensor | float | None = None,
    mean_weight: Tensor | float | None = None,
    token_coef_BT: Tensor | None = None,
    objective: str = "ppo",
    context: TokenContext | None = None,
    active_BT: Tensor | None = None,
) -> PolicyLossTerms:
    """Loss, weights and statistics of one micro-batch.

    log_probs (with gradient), old_log_probs, advantages and response_mask are [B, T]. r is
    exp(log_probs - old_log_probs) with the difference held to [-20, 20]. dual_clip (arXiv
    1912.09729) limits a token with A < 0 to dual_clip * A from below; inside, the limit holds for
    w r A, outside, for r A before the weight. token_coef_BT multiplies the per-token loss, see
    ``rollout_correction``. The aggregation arguments are those of ``aggregate``, mean_weight is
    that of ``token_weights``.

    objective: ``ppo`` or ``cispo`` (placement ``outside``; no dual clip, there is nothing to
    limit). context: see ``weightings``; old_log_probs and advantages are filled in here. active_BT:
    where it is False a response token keeps its share of the denominator and gives nothing to the
    loss, the gradient or the statistics (one pass of ``lopti``).

    The weight is rounded to the dtype of the ratio, so that a bfloat16 loss stays bfloat16. Masked
    positions may hold anything, NaN included: they reach neither the loss nor the gradient. Raises
    ``ValueError`` for dual_clip <= 1, an unknown objective, or cispo with a weight inside the clip.
    Degenerate case: w = 1 is upstream's PPO loss bit for bit.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip!r}: expected a number above 1, or None")
    check_objective(objective, cfg)
    context = dataclasses.replace(
        context or TokenContext(),
        old_log_probs=old_log_probs.masked_fill(response_mask == 0, 0.0),
        advantages=advantages,
    )
    raw_weights_BT = unnormalized_weights(log_probs, cfg, response_mask, context=context)
    weights_BT = normalize_weights(raw_weights_BT, cfg, response_mask, mean_weight=mean_weight)
    # This fill keeps masked values out of the gradient, those of `aggregate` out of the value.
    log_ratio_BT = (log_probs - old_log_probs).masked_fill(response_mask == 0, 0.0)
    ratio_BT = log_ratio_BT.clamp(min=-_LOG_RATIO_LIMIT, max=_LOG_RATIO_LIMIT).exp()

    clip = _Clip(eps_low, eps_high, dual_clip, cfg.placement == "inside")
    surrogate_of = _cispo_surrogate if objective == "cispo" else _ppo_surrogate
    surrogate = surrogate_of(ratio_BT, weights_BT.to(ratio_BT.dtype), advantages, clip)
    loss_BT = -surrogate.value_BT
    if token_coef_BT is not None:
        loss_BT = token_coef_BT * loss_BT
    counted_BT = response_mask
    if active_BT is not None:
        loss_BT = loss_BT.masked_fill(~active_BT, 0.0)
        counted_BT = (response_mask != 0) & active_BT
    loss = aggregate(
        loss_BT,
        response_mask,
        token_level_loss=token_level_loss,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
    )
    with torch.no_grad():
        on_policy = surrogate_of(
            torch.ones_like(ratio_BT), weights_BT.to(ratio_BT.dtype), advantages, clip
        )
        statistics = token_statistics(
            mask_BT=counted_BT,
            probs_BT=log_probs.double().clamp(max=0.0).exp(),
            log_ratio_BT=log_ratio_BT,
            advantages_BT=advantages,
            loss_BT=loss_BT,
            weights_BT=weights_BT,
            raw_weights_BT=raw_weights_BT,
            weight_bounds=weight_bounds(cfg),
            clipped_BT=surrogate.clipped_BT,
            dual_clipped_BT=surrogate.dual_clipped_BT,
            zeroed_BT=surrogate.zeroed_BT | (weights_BT == 0),
            zeroed_at_ratio1_BT=on_policy.zeroed_BT | (weights_BT == 0),
        )
    return PolicyLossTerms(loss, weights_BT, statistics)


def check_objective(objective: str, cfg: TokenWeightConfig) -> None:
    """``ValueError`` for an objective that is unknown or does not go with the weighting."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r}: expected one of {', '.join(OBJECTIVES)}")
    if objective == "cispo" and cfg.placement != "outside":
        raise ValueError(
            f"placement={cfg.placement!r}: expected 'outside' with cispo, which has no clip that "
            "a weight could sit inside of"
        )


@dataclass(frozen=True)
class _Clip:
    eps_low: float
    eps_high: float
    dual_clip: float | None
    weight_inside: bool


@dataclass(frozen=True)
class _Surrogate:
    """J of the module docstring, where a clip acted, and where no policy gradient is left."""

    value_BT: Tensor
    clipped_BT: Tensor
    dual_clipped_BT: Tensor
    zeroed_BT: Tensor


def _ppo_surrogate(
    ratio_BT: Tensor, weights_BT: Tensor, advantages_BT: Tensor, clip: _Clip
) -> _Surrogate:
    x_BT = weights_BT * ratio_BT if clip.weight_inside else ratio_BT
    free_BT = x_BT * advantages_BT
    bounded_BT = x_BT.clamp(1 - clip.eps_low, 1 + clip.eps_high) * advantages_BT
    value_BT = torch.min(free_BT, bounded_BT)
    if clip.dual_clip is None:
        dual_clipped_BT = torch.zeros_like(value_BT, dtype=torch.bool)
    else:
        floor_BT = clip.dual_clip * advantages_BT
        dual_clipped_BT = (advantages_BT < 0) & (floor_BT > value_BT)
        limited_BT = torch.max(value_BT, floor_BT)
        value_BT = torch.where(advantages_BT < 0, limited_BT, value_BT)
    if not clip.weight_inside:
        value_BT = weights_BT * value_BT
    clipped_BT = torch.lt(bounded_BT, free_BT)
    return _Surrogate(value_BT, clipped_BT, dual_clipped_BT, clipped_BT | dual_clipped_BT)


def _cispo_surrogate(
    ratio_BT: Tensor, weights_BT: Tensor, advantages_BT: Tensor, clip: _Clip
) -> _Surrogate:
    bounded_BT = ratio_BT.detach().clamp(1 - clip.eps_low, 1 + clip.eps_high)
    value_BT = weights_BT * ((bounded_BT / ratio_BT.detach()) * ratio_BT * advantages_BT)
    nowhere_BT = torch.zeros_like(value_BT, dtype=torch.bool)
    return _Surrogate(value_BT, bounded_BT != ratio_BT, nowhere_BT, nowhere_BT)
