"""Token weights of a batch of sampled tokens, before and after normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from sg_rlhf.algo.weightings import TokenContext, Weighting


def token_weights(
    log_probs_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor | None = None,
    *,
    context: TokenContext | None = None,
) -> Tensor:
    """Weights of sampled tokens, from their log-probs.

    w = cfg.weights(p) with p = exp(log-prob) limited to [0, 1], so that 0, -1e4, -inf and rounding
    above 0 all give a finite weight. With ``cfg.normalize="batch_mean"`` the weights are divided by
    their mean.

    Args:
        log_probs_BT: [B, T], log-probs of the tokens; read without a gradient. With
            ``cfg.probability="engine"`` the weight reads ``context.engine_log_probs`` instead.
        mask_BT: [B, T], not 0 on the tokens that count; None for all. Elsewhere the log-prob is not
            read, and the weight has no meaning.
        context: what else the weighting reads (``cfg.reads``), and the mean that ``batch_mean``
            divides by.

    Returns:
        [B, T] without a gradient, float32 (float64 for float64 log-probs).

    Raises:
        ValueError: the context lacks what the weighting reads.
    """
    raw_BT = unnormalized_weights(log_probs_BT.detach(), cfg, mask_BT, context=context)
    return normalize_weights(raw_BT, cfg, mask_BT, context=context)


def unnormalized_weights(
    log_probs_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor | None = None,
    *,
    context: TokenContext | None = None,
) -> Tensor:
    """:func:`token_weights` [B, T] before normalisation; within ``cfg.bounds()`` unless NaN.

    With a gradient if ``cfg.stop_gradient`` is False.
    """
    context = context or TokenContext()
    dtype = torch.float64 if log_probs_BT.dtype == torch.float64 else torch.float32
    log_p_BT = log_probs_BT.detach() if cfg.stop_gradient else log_probs_BT
    if cfg.probability == "engine":
        log_p_BT = context.require("engine_log_probs", cfg.name)
    return _weights_at(log_p_BT, cfg, mask_BT, context, dtype)


def weight_shift(
    old_log_probs_BT: Tensor,
    engine_log_probs_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor,
    context: TokenContext,
) -> Tensor:
    """abs(w(p_trainer) - w(p_engine)) before normalisation: [B, T], float64, no gradient."""
    pair = (old_log_probs_BT.detach(), engine_log_probs_BT.detach())
    ours, engines = (_weights_at(p, cfg, mask_BT, context, torch.float64) for p in pair)
    return (ours - engines).abs()


def _weights_at(
    log_p_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor | None,
    context: TokenContext,
    dtype: torch.dtype,
) -> Tensor:
    if mask_BT is not None:
        log_p_BT = log_p_BT.masked_fill(mask_BT == 0, 0.0)
    p_BT = log_p_BT.to(dtype).clamp(max=0.0).exp()
    mask_BT = torch.ones_like(p_BT) if mask_BT is None else mask_BT
    return cfg.weights(p_BT, cfg.prepare(context, mask_BT))


def normalize_weights(
    weights_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor | None = None,
    *,
    context: TokenContext | None = None,
) -> Tensor:
    """Divide weights by their mean if ``cfg.normalize`` is ``batch_mean``; else return them."""
    if cfg.normalize is None:
        return weights_BT
    mean_weight = context.mean_weight if context is not None else None
    if mean_weight is None:
        total, count = _sum_and_count(weights_BT, mask_BT)
        mean_weight = torch.where(total > 0, total / count.clamp(min=1), 1.0).to(weights_BT.dtype)
    return weights_BT / mean_weight


def weight_sum_and_count(
    log_probs_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor | None = None,
    *,
    context: TokenContext | None = None,
) -> Tensor:
    """Float64 [2]: sum of the unnormalised weights and number of tokens.

    Additive over micro-batches and ranks; the quotient is ``TokenContext.mean_weight``.
    """
    weights_BT = unnormalized_weights(log_probs_BT, cfg, mask_BT, context=context)
    return torch.stack(_sum_and_count(weights_BT, mask_BT))


def _sum_and_count(weights_BT: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    valid_BT = torch.ones_like(weights_BT, dtype=torch.bool) if mask_BT is None else mask_BT != 0
    total = weights_BT.masked_fill(~valid_BT, 0.0).sum(dtype=torch.float64)
    return total, valid_BT.sum().double()
