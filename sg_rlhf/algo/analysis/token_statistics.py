"""Statistics of a batch's tokens, weights and loss, kept as additive sums.

A mean of means is wrong as soon as micro-batches differ in length. So sums over tokens are added
over micro-batches, optimizer steps and ranks, and divided once at the end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from sg_rlhf.algo.weightings import CONSTANT_TOLERANCE

# Equal bins of p, and of the weight's range.
PROB_BINS = 20
WEIGHT_BINS = 64
_LARGEST_LOG_RATIO = 20.0
WEIGHT_QUANTILES = (0.05, 0.95)

# One additive sum over response tokens each. `pos` and `neg` are the tokens with A > 0 and A < 0;
# a token with A = 0 is in neither. `w1mp` is w * (1 - p), the factor of the gradient bounds in
# Theorems 3.5 and 3.6 of arXiv 2511.00066. `_sq` marks a sum of squares, `_r1` what happens at
# ratio 1.
SCALAR_SUMS = (
    "tokens",
    "pos",
    "neg",
    "log_ratio",
    "weight",
    "weight_sq",
    "clipped",
    "dual_clipped",
    "zeroed_pos",
    "zeroed_neg",
    "zeroed_pos_r1",
    "w1mp",
    "mismatch",
    "mismatch_abs",
    "mismatch_k3",
    "mismatch_ratio",
    "mismatch_ratio_sq",
    "mismatch_weight",
    "mismatch_tokens",
)
# What is kept as the largest value instead of a sum.
LARGEST_NAMES = ("mismatch_max", "mismatch_weight_max")
# Tokens per bin.
_HISTOGRAMS = {"prob_hist": PROB_BINS, "weight_hist": WEIGHT_BINS}
SUM_NAMES = (
    *SCALAR_SUMS,
    *(f"{name}_{i}" for name, bins in _HISTOGRAMS.items() for i in range(bins)),
)
_INDEX = {name: i for i, name in enumerate(SUM_NAMES)}

# metric: (sum, what it is divided by, sign)
_MEANS = {
    "ppo_kl": ("log_ratio", "tokens", -1.0),
    "weight_mean": ("weight", "tokens", 1.0),
    "clip_ratio": ("clipped", "tokens", 1.0),
    "dual_clip_ratio": ("dual_clipped", "tokens", 1.0),
    "zeroed_pos": ("zeroed_pos", "pos", 1.0),
    "zeroed_neg": ("zeroed_neg", "neg", 1.0),
    "zeroed_pos_at_ratio1": ("zeroed_pos_r1", "pos", 1.0),
    "w_one_minus_p_mean": ("w1mp", "tokens", 1.0),
    "mismatch_kl": ("mismatch", "mismatch_tokens", 1.0),
    "mismatch_kl_k3": ("mismatch_k3", "mismatch_tokens", 1.0),
    "mismatch_abs_mean": ("mismatch_abs", "mismatch_tokens", 1.0),
    "mismatch_weight_mean": ("mismatch_weight", "mismatch_tokens", 1.0),
}
_COUNTS = {"n_tokens": "tokens", "n_mismatch_tokens": "mismatch_tokens"}
METRIC_NAMES = (
    *_COUNTS,
    *_MEANS,
    "weight_std",
    "mismatch_ess",
    *LARGEST_NAMES,
    *(f"weight_q{round(100 * q):02d}" for q in WEIGHT_QUANTILES),
)


@dataclass(frozen=True)
class TokenStatistics:
    """Additive sums over tokens: ``sums`` is float64, shape [len(SUM_NAMES)], in that order.

    weight_bounds: what the bins of the weight's histogram span, None where there are no weights.
    Statistics that are added have the same. largest: float64 [len(LARGEST_NAMES)], not added but
    the larger of both; None for zeros.
    """

    sums: Tensor
    weight_bounds: tuple[float, float] | None = None
    largest: Tensor | None = None

    @classmethod
    def zeros(cls, device: torch.device | str | None = None) -> TokenStatistics:
        return cls(torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device))

    def __add__(self, other: TokenStatistics) -> TokenStatistics:
        bounds = {self.weight_bounds, other.weight_bounds} - {None}
        assert len(bounds) <= 1, f"histograms of different ranges cannot be added: {bounds}"
        largest = torch.maximum(self.maxima(), other.maxima())
        return TokenStatistics(self.sums + other.sums, next(iter(bounds), None), largest)

    def maxima(self) -> Tensor:
        """The maxima, float64, in the order of ``LARGEST_NAMES``."""
        if self.largest is not None:
            return self.largest
        return self.sums.new_zeros(len(LARGEST_NAMES))

    def histogram(self, name: str) -> Tensor:
        """A histogram, float64 [bins]: prob_hist or weight_hist."""
        first = _INDEX[f"{name}_0"]
        return self.sums[first : first + _HISTOGRAMS[name]]

    def __getitem__(self, name: str) -> Tensor:
        """One sum by its name, a float64 0-d tensor."""
        return self.sums[_INDEX[name]]

    def mean(self, metric: str) -> Tensor:
        """A plain mean, such as ``clip_ratio``: a float64 0-d tensor; no host synchronisation."""
        total, count, sign = _MEANS[metric]
        return sign * self._mean(total, count)

    def metric_tensors(self) -> dict[str, Tensor]:
        """Every metric of ``METRIC_NAMES`` as a float64 0-d tensor on the CPU.

        Waits for the device once. On a GPU each of the many small operations would be a kernel, and
        the cumulative sum of the quantiles has no deterministic one.

        weight_std: the population standard deviation. weight_qNN: quantiles of the weight before
        normalisation, exact to a bin, 1/64 of its range. A share is over its own tokens
        (``zeroed_pos`` over those with A > 0, say). mismatch_*: see ``mismatch_statistics``;
        mismatch_ess is the effective sample size of the ratios as a share of the tokens. Without
        tokens a metric is 0.0.
        """
        here = TokenStatistics(self.sums.cpu(), self.weight_bounds, self.maxima().cpu())
        metrics = {metric: here[count] for metric, count in _COUNTS.items()}
        metrics |= {metric: here.mean(metric) for metric in _MEANS}
        variance = here._mean("weight_sq", "tokens") - here._mean("weight", "tokens") ** 2
        metrics["weight_std"] = variance.clamp(min=0.0).sqrt()
        # (sum r)^2 / (n sum r^2): 1 where all ratios are equal, 1/n where one outweighs the others.
        most = (here["mismatch_tokens"] * here["mismatch_ratio_sq"]).clamp(min=1e-300)
        metrics["mismatch_ess"] = here["mismatch_ratio"] ** 2 / most
        metrics |= dict(zip(LARGEST_NAMES, here.maxima().unbind(), strict=True))
        names = METRIC_NAMES[len(metrics) :]
        return metrics | dict(zip(names, here._weight_quantiles(), strict=True))

    def _weight_quantiles(self) -> list[Tensor]:
        low, high = self.weight_bounds or (0.0, 0.0)
        cumulative = self.histogram("weight_hist").cumsum(0)
        levels = torch.tensor(WEIGHT_QUANTILES, dtype=torch.float64)
        bins = torch.searchsorted(cumulative, levels * cumulative[-1]).clamp(max=WEIGHT_BINS - 1)
        # A bin's own end at either end of the range, where the clip puts whole masses of tokens.
        share = bins / (WEIGHT_BINS - 1)
        quantiles = (low + (high - low) * share) * (cumulative[-1] > 0)
        return list(quantiles.unbind())

    def metrics(self) -> dict[str, float]:
        """:func:`metric_tensors` as Python floats."""
        tensors = self.metric_tensors()
        return dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))

    def _mean(self, total: str, count: str) -> Tensor:
        return self[total] / self[count].clamp(min=1.0)


def token_statistics(
    *,
    mask_BT: Tensor,
    probs_BT: Tensor,
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    weights_BT: Tensor,
    raw_weights_BT: Tensor,
    weight_bounds: tuple[float, float],
    clipped_BT: Tensor,
    dual_clipped_BT: Tensor,
    zeroed_BT: Tensor,
    zeroed_at_ratio1_BT: Tensor,
) -> TokenStatistics:
    """The policy loss's statistics, summed over the tokens of a micro-batch.

    Inputs are read without a gradient. Masked values are never added: they may be infinite or NaN.

    Args:
        mask_BT: [B, T], not 0 on the tokens that count.
        probs_BT: [B, T], p.
        log_ratio_BT: [B, T], log p - log p_old, not limited.
        advantages_BT: [B, T].
        weights_BT: [B, T], w as it enters the loss.
        raw_weights_BT: [B, T], w before normalisation.
        weight_bounds: (min, max) of the unnormalised weight, the range of its histogram.
        clipped_BT: bool [B, T], where the clipped surrogate is the smaller one.
        dual_clipped_BT: bool [B, T], where dual clip replaces the surrogate.
        zeroed_BT: bool [B, T], where no policy gradient is left.
        zeroed_at_ratio1_BT: bool [B, T], the same at r = 1.
    """
    valid_BT = mask_BT != 0
    pos_BT, neg_BT = advantages_BT > 0, advantages_BT < 0
    probs_BT, weights_BT = probs_BT.double(), weights_BT.double()
    low, high = weight_bounds
    by_name = {
        "tokens": valid_BT,
        "pos": pos_BT,
        "neg": neg_BT,
        "log_ratio": log_ratio_BT,
        "weight": weights_BT,
        "weight_sq": weights_BT**2,
        "clipped": clipped_BT,
        "dual_clipped": dual_clipped_BT,
        "zeroed_pos": zeroed_BT & pos_BT,
        "zeroed_neg": zeroed_BT & neg_BT,
        "zeroed_pos_r1": zeroed_at_ratio1_BT & pos_BT,
        "w1mp": weights_BT * (1.0 - probs_BT),
    }
    unit_weights_BT = (raw_weights_BT.double() - low) / max(high - low, CONSTANT_TOLERANCE)
    histograms = {
        "prob_hist": _histogram(probs_BT, PROB_BINS, valid_BT),
        "weight_hist": _histogram(unit_weights_BT, WEIGHT_BINS, valid_BT),
    }
    return dataclasses.replace(_collect(by_name, valid_BT, histograms), weight_bounds=weight_bounds)


def mismatch_statistics(
    old_log_probs_BT: Tensor,
    engine_log_probs_BT: Tensor,
    mask_BT: Tensor,
    weight_shift_BT: Tensor | None = None,
) -> TokenStatistics:
    """Statistics of the difference between the trainer's and the rollout engine's log-probs.

    With d = log pi_trainer - log pi_engine and r = exp(d), limited to exp(+-20): mismatch_kl is the
    mean of -d and mismatch_kl_k3 that of r - 1 - d, two estimates of KL(engine || trainer), since
    the engine sampled the tokens (k1 and k3 of http://joschu.net/blog/kl-approx.html).
    mismatch_abs_mean and mismatch_max are of abs(d), mismatch_ess is of r.

    Args:
        old_log_probs_BT: [B, T], as the trainer computes them.
        engine_log_probs_BT: [B, T], as the engine computed them.
        mask_BT: [B, T], not 0 on the tokens that count.
        weight_shift_BT: [B, T], of :func:`~sg_rlhf.algo.token_weights.weight_shift`, for
            mismatch_weight_mean and mismatch_weight_max; None for 0.

    Returns:
        Statistics to add to those of the policy loss.
    """
    valid_BT = mask_BT != 0
    d_BT = (old_log_probs_BT - engine_log_probs_BT).detach().double().masked_fill(~valid_BT, 0.0)
    ratio_BT = d_BT.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    shift_BT = torch.zeros_like(d_BT) if weight_shift_BT is None else weight_shift_BT.double()
    shift_BT = shift_BT.masked_fill(~valid_BT, 0.0)
    statistics = _collect(
        {
            "mismatch": -d_BT,
            "mismatch_abs": d_BT.abs(),
            "mismatch_k3": ratio_BT - 1.0 - d_BT,
            "mismatch_ratio": ratio_BT,
            "mismatch_ratio_sq": ratio_BT**2,
            "mismatch_weight": shift_BT,
            "mismatch_tokens": valid_BT,
        },
        valid_BT,
    )
    tops = [values.flatten() for values in (d_BT.abs(), shift_BT)]
    # A batch may have no tokens at all.
    largest = torch.stack([torch.cat([top, top.new_zeros(1)]).max() for top in tops])
    return TokenStatistics(statistics.sums, None, largest)


def _histogram(x_BT: Tensor, bins: int, valid_BT: Tensor) -> Tensor:
    """Tokens per equal bin of [0, 1], float64 [bins]; 1 is in the last. No host sync."""
    index = (x_BT * bins).nan_to_num(0.0).clamp(0, bins - 1).long().flatten()
    empty = torch.zeros(bins, dtype=torch.float64, device=x_BT.device)
    return empty.index_add_(0, index, valid_BT.double().flatten())


def _collect(
    values: dict[str, Tensor], valid_BT: Tensor, histograms: dict[str, Tensor] | None = None
) -> TokenStatistics:
    zero = torch.zeros((), dtype=torch.float64, device=valid_BT.device)
    invalid_BT = ~valid_BT
    sums = {
        name: value_BT.detach().double().masked_fill(invalid_BT, 0.0).sum()
        for name, value_BT in values.items()
    }
    scalars = torch.stack([sums.get(name, zero) for name in SCALAR_SUMS])
    present = histograms or {}
    parts = [
        present.get(name, torch.zeros(bins, dtype=torch.float64, device=valid_BT.device))
        for name, bins in _HISTOGRAMS.items()
    ]
    return TokenStatistics(torch.cat([scalars, *parts]))
