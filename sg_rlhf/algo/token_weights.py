"""The weights of a batch of sampled tokens, before and after normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from sg_rlhf.algo.weightings import TokenContext, Weighting


def token_weights(
    log_probs_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor | None = None,
    *,
    mean_weight: Tensor | float | None = None,
    context: TokenContext | None = None,
) -> Tensor:
    """Weights [B, T] of sampled tokens from their log-probabilities, without a gradient.

    Computed in float32, or in float64 for float64 input. p is exp(log-prob) held to [0, 1], so 0,
    -1e4, -inf and rounding above 0 all give a finite weight. Where mask_BT is 0 the
    log-probability is not read and the weight there has no meaning. With
    ``cfg.probability="engine"`` p is that of ``context.engine_log_probs`` instead.

    With ``normalize="batch_mean"`` the weights are divided by ``mean_weight``, or by the mean
    over the masked tokens at hand when that is None. Gradient accumulation and data parallelism
    need the mean over the whole optimizer step to stay exact: add ``weight_sum_and_count`` over
    the shards and pass the quotient. The attainable range then depends on the data.
    ``mean_weight`` is not used without normalisation. context: what else the weighting reads
    (``cfg.reads``); ``ValueError`` where that is missing.
    """
    raw_BT = unnormalized_weights(log_probs_BT, cfg, mask_BT, context=context)
    return normalize_weights(raw_BT, cfg, mask_BT, mean_weight=mean_weight)


def unnormalized_weights(
    log_probs_BT: Tensor,
    cfg: Weighting,
    mask_BT: Tensor | None = None,
    *,
    context: TokenContext | None = None,
) -> Tensor:
    """``token_weights`` before normalisation: within ``cfg.bounds()`` unless NaN."""
    context = context or TokenContext()
    dtype = torch.float64 if log_probs_BT.dtype == torch.float64 else torch.float32
    log_p_BT = log_probs_BT.detach()
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
    """abs(w(p_trainer) - w(p_engine)) [B, T] of the policy that sampled, before normalisation."""
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
    mean_weight: Tensor | float | None = None,
) -> Tensor:
    """Divides by the mean weight if the weighting says so; returns the input itself if not."""
    if cfg.normalize is None:
        return weights_BT
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
    """float64 [sum of unnormalised weights, number of tokens], additive over shards.

    For the ``mean_weight`` of ``token_weights``.
    """
    weights_BT = unnormalized_weights(log_probs_BT, cfg, mask_BT, context=context)
    return torch.stack(_sum_and_count(weights_BT, mask_BT))


def _sum_and_count(weights_BT: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    valid_BT = torch.ones_like(weights_BT, dtype=torch.bool) if mask_BT is None else mask_BT != 0
    total = weights_BT.masked_fill(~valid_BT, 0.0).sum(dtype=torch.float64)
    return total, valid_BT.sum().double()
