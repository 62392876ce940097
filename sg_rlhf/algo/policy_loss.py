"""The policy-gradient loss with a weight per token (arXiv 2511.00066, Eq. 13).

A weighting (``sg_rlhf.algo.weightings``) gives w, an objective (``sg_rlhf.algo.objectives``) gives
the surrogate J of each token; the loss is the aggregate of -J. Where w = 1 the objective ``ppo`` is
GRPO (arXiv 2402.03300), equal to OpenRLHF's PolicyLoss bit for bit in the value and the gradient,
up to the sign of a zero gradient at masked positions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sg_rlhf.algo.aggregation import AGGREGATIONS, aggregate, prompt_token_counts
from sg_rlhf.algo.analysis.gradient_dead_zones import warn_once
from sg_rlhf.algo.analysis.token_statistics import TokenStatistics, token_statistics
from sg_rlhf.algo.objectives import Clip, Objective, Tokens, check_objective, make_objective
from sg_rlhf.algo.token_weights import normalize_weights, unnormalized_weights
from sg_rlhf.algo.weightings import TokenContext, Weighting, make_weighting

_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyLossTerms:
    """The result of :func:`policy_loss_terms`.

    Attributes:
        loss: the scalar to differentiate.
        loss_BT: [B, T], -token_coef J before the aggregation, with a gradient; 0 at masked tokens.
        weights_BT: [B, T], the token weights w, without a gradient.
        statistics: sums over the tokens, additive over micro-batches and ranks.
    """

    loss: Tensor
    loss_BT: Tensor
    weights_BT: Tensor
    statistics: TokenStatistics


def token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weighting: str | Weighting = "grpo_sg",
    *,
    objective: str | Objective = "ppo",
    eps_low: float = 0.2,
    eps_high: float = 0.24,
    dual_clip: float | None = None,
    aggregation: str = "token-mean",
    prompts: Tensor | None = None,
    total: Tensor | float | None = None,
    **options: Any,
) -> Tensor:
    """The loss of a batch, for a training loop of your own.

    :func:`policy_loss_terms` with the names and defaults of the paper. ``aggregation``::

        token-mean    mean over all tokens of the batch (DAPO, arXiv 2503.14476)
        seq-mean      mean over responses of the mean over their tokens (GRPO, arXiv 2402.03300)
        prompt-mean   mean over prompts of the mean over the tokens of all their responses
                      (Eq. 5 of arXiv 2511.00066)

    Args:
        log_probs: [B, T], log-probs of the response tokens under the current policy, with gradient.
        old_log_probs: [B, T], the same under the policy that sampled.
        advantages: [B], one per response, or [B, T].
        mask: [B, T], 1 or True on response tokens.
        weighting: the token weighting, or its name for default parameters.
        objective: the objective, or its name for default parameters.
        eps_low: lower clip range, above 0.
        eps_high: upper clip range, above 0.
        dual_clip: see ``policy_loss_terms``.
        aggregation: one of :data:`~sg_rlhf.algo.aggregation.AGGREGATIONS`.
        prompts: [B], integers, equal for responses of one prompt; for prompt-mean. All responses of
            a prompt must be in this batch.
        total: what the mean divides by: tokens, responses or prompts. With gradient accumulation
            that of the whole optimizer step, so that the losses of its micro-batches add up to the
            loss of one batch. None for that of this batch.
        **options: others of ``policy_loss_terms``: ``mean_weight``, ``token_coef_BT``, ``context``,
            ``active_BT``.

    Returns:
        The scalar to differentiate.

    Raises:
        ValueError: an unknown name, or prompt-mean without prompts.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r}: expected one of {', '.join(AGGREGATIONS)}")
    if aggregation == "prompt-mean":
        if prompts is None:
            raise ValueError("aggregation='prompt-mean': expected prompts, got None")
        options["prompt_tokens_B"] = prompt_token_counts(mask, prompts)
    options["batch_num_tokens" if aggregation == "token-mean" else "global_batch_size"] = total
    return policy_loss_terms(
        log_probs,
        old_log_probs,
        advantages if advantages.dim() > 1 else advantages[:, None].expand_as(log_probs),
        mask,
        make_weighting(weighting),
        eps_low,
        eps_high,
        dual_clip,
        objective=objective,
        token_level_loss=aggregation == "token-mean",
        **options,
    ).loss


def sg_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cfg: Weighting,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch and its metrics.

    As :func:`policy_loss_terms`, whose arguments it takes, with the statistics turned into metrics.
    This waits for the device; ``policy_loss_terms`` does not. The metrics describe this micro-batch
    alone. To merge micro-batches or ranks, add ``policy_loss_terms(...).statistics`` instead.

    Returns:
        ``(loss, metrics)``: the scalar to differentiate, and metric name
        (``token_statistics.METRIC_NAMES``) -> float64 0-d tensor on the CPU.
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
    cfg: Weighting,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    *,
    token_level_loss: bool = True,
    dp_size: int = 1,
    batch_num_tokens: Tensor | float | None = None,
    global_batch_size: Tensor | float | None = None,
    prompt_tokens_B: Tensor | None = None,
    mean_weight: Tensor | float | None = None,
    token_coef_BT: Tensor | None = None,
    objective: str | Objective = "ppo",
    context: TokenContext | None = None,
    active_BT: Tensor | None = None,
) -> PolicyLossTerms:
    """Loss, token weights and statistics of one micro-batch.

    With the ratio r = exp(log_probs - old_log_probs), the difference limited to [-20, 20], the
    weight w of ``cfg`` and the objective ``ppo``::

        inside the clip (Eq. 13):   J = min(w r A, clip(w r, 1 - eps_low, 1 + eps_high) A)
        outside the clip:           J = w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
        loss = aggregate(-token_coef J)

    w is constant in the gradient, unless ``cfg.stop_gradient`` is False: then the objective is that
    of Eq. 10 to 12, and a token that is not clipped has the gradient (w + p dw/dp) r A. w is
    rounded to the dtype of r, so that a bfloat16 loss stays bfloat16. With w = 1 this is OpenRLHF
    0.11.2's PPO loss bit for bit. Masked positions may hold anything, also NaN: they reach neither
    the loss nor the gradient.

    Args:
        log_probs: [B, T], log-probs of the response tokens under the current policy, with gradient.
        old_log_probs: [B, T], the same under the policy that sampled.
        advantages: [B, T].
        response_mask: [B, T], 1 or True on response tokens.
        cfg: the token weighting, of :func:`~sg_rlhf.algo.weightings.make_weighting`.
        eps_low: lower clip range, above 0.
        eps_high: upper clip range, above 0.
        dual_clip: None, or a number above 1: a token with A < 0 gives at least dual_clip A (arXiv
            1912.09729). Inside the clip this limits w r A, outside it limits r A before the weight.
        token_level_loss: see :func:`~sg_rlhf.algo.aggregation.aggregate`.
        dp_size: see ``aggregate``.
        batch_num_tokens: see ``aggregate``.
        global_batch_size: see ``aggregate``.
        prompt_tokens_B: see ``aggregate``.
        mean_weight: see :func:`~sg_rlhf.algo.token_weights.token_weights`.
        token_coef_BT: [B, T], factor of each token's loss without a gradient, as
            :func:`~sg_rlhf.algo.rollout_correction.rollout_correction` gives it; None for 1.
        objective: the objective, or its name for default parameters.
        context: what else the weighting reads (``cfg.reads``). ``old_log_probs``, ``advantages``
            and ``eps`` are filled in here.
        active_BT: bool [B, T]. Where it is False a response token counts in the denominator but
            gives nothing to the loss, the gradient or the statistics (a pass of
            :mod:`~sg_rlhf.algo.lopti`). None for all tokens.

    Returns:
        The loss, the weights and the statistics; no host synchronisation.

    Raises:
        ValueError: dual_clip <= 1, an unknown objective, or a weight inside a clip that the
            objective does not have.

    Warns:
        DeadZoneWarning: once, if the weight inside the clip leaves some tokens without a gradient.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip!r}: expected a number above 1, or None")
    objective = make_objective(objective)
    check_objective(objective, cfg)
    warn_once(cfg, eps_low, eps_high, dual_clip)
    old_log_probs_BT = old_log_probs.masked_fill(response_mask == 0, 0.0)
    context = dataclasses.replace(
        context or TokenContext(),
        old_log_probs=old_log_probs_BT,
        advantages=advantages,
        eps=(eps_low, eps_high),
    )
    raw_weights_BT = unnormalized_weights(log_probs, cfg, response_mask, context=context)
    weights_BT = normalize_weights(raw_weights_BT, cfg, response_mask, mean_weight=mean_weight)
    # This fill keeps masked values out of the gradient, those of `aggregate` out of the value.
    log_ratio_BT = (log_probs - old_log_probs).masked_fill(response_mask == 0, 0.0)
    ratio_BT = log_ratio_BT.clamp(min=-_LOG_RATIO_LIMIT, max=_LOG_RATIO_LIMIT).exp()

    clip = Clip(eps_low, eps_high, dual_clip, cfg.placement == "inside")
    tokens = Tokens(ratio_BT, weights_BT.to(ratio_BT.dtype), advantages, old_log_probs_BT)
    surrogate = objective.surrogate(tokens, clip)
    weights_BT, raw_weights_BT = weights_BT.detach(), raw_weights_BT.detach()
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
        prompt_tokens_B=prompt_tokens_B,
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
            loss_BT=loss_BT,
            weights_BT=weights_BT,
            raw_weights_BT=raw_weights_BT,
            weight_bounds=cfg.bounds(),
            clipped_BT=surrogate.clipped_BT,
            dual_clipped_BT=surrogate.dual_clipped_BT,
            zeroed_BT=surrogate.zeroed_BT | (weights_BT == 0),
            zeroed_at_ratio1_BT=on_policy.zeroed_BT | (weights_BT == 0),
        )
    loss_BT = loss_BT.masked_fill(response_mask == 0, 0.0)
    return PolicyLossTerms(loss, loss_BT, weights_BT, statistics)
