"""Token weights: how strongly each sampled token takes part in the update.

GRPO-SG (arXiv 2511.00066, Eq. 19): ``w = clip(alpha * (sigmoid(f(p)) - mu), L, U)``, where p is the
token's probability under the current policy, held constant in the gradient. Two readings of f:

- ``product``: f(p) = tau * p. The weight spans (0.5, 1.5) before the clip, as App. C.1 says it
  does.
- ``quotient``: f(p) = p / tau, as Eq. 19 is printed. With the published constants every weight is
  below L, so the clip turns all of them into 1.0: plain GRPO. See docs/method.md.

The weightings by name, those of the ablations and baselines among them, are in ``weightings``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from sg_rlhf.algo.weightings import SHAPINGS, TokenContext

# Weights closer together than this are one weight: float32 could hardly tell them apart.
CONSTANT_TOLERANCE = 1e-6
_GRID_POINTS = 1025
_MEAN_POINTS = 65537
_NUMBERS = ("alpha", "mu", "tau", "lower", "upper")
# Above these a weight would be negative, or a threshold would say nothing.
_UP_TO = {"random_spread": 1.0, "ar_alpha": 1.0, "stapo_prob": 1.0, "stapo_entropy": math.inf}


class ConstantWeightError(ValueError):
    """The weight is the same for every token: plain GRPO under another name."""


@dataclass(frozen=True)
class TokenWeightConfig:
    """One token weighting; the defaults are the published constants in the product form.

    shaping: a name in ``SHAPINGS``. form: ``product`` or ``quotient``. alpha, mu, tau, lower (L)
    and upper (U): the constants of Eq. 19. placement: ``inside`` the clip (Eq. 13) or ``outside``
    it. normalize: None, or ``batch_mean`` to divide by the masked mean weight. allow_constant:
    accept a weight that takes a single value. random_*, ar_* and stapo_* are the parameters of the
    weightings of these names (``weightings``); stapo_entropy is in nats.

    Constructing the config is the check, so nothing can train on one that was never checked. A
    value out of range raises ``ValueError``; a weight that is the same for every p in [0, 1]
    raises ``ConstantWeightError`` unless allow_constant is set or shaping is ``uniform``, which
    is plain GRPO by name. Code that only describes a weighting sets allow_constant.
    """

    shaping: str = "grpo_sg"
    form: str = "product"
    alpha: float = 2.0
    mu: float = 0.25
    tau: float = 9.0
    lower: float = 1.0
    upper: float = 1.4
    placement: str = "inside"
    normalize: str | None = None
    allow_constant: bool = False
    random_spread: float = 0.5
    random_seed: int = 0
    ar_alpha: float = 0.3
    stapo_prob: float = 0.002
    stapo_entropy: float = 0.5

    @classmethod
    def from_settings(cls, settings: object, **changes: object) -> TokenWeightConfig:
        """The fields of these names of ``settings`` (a recipe's section, a namespace), changed."""
        values = {field.name: getattr(settings, field.name) for field in fields(cls)}
        return cls(**{**values, **changes})

    def __post_init__(self) -> None:
        self._check_choice("shaping", tuple(SHAPINGS))
        self._check_choice("form", ("product", "quotient"))
        self._check_choice("placement", ("inside", "outside"))
        self._check_choice("normalize", (None, "batch_mean"))
        for key in (*_NUMBERS, *_UP_TO):
            value = getattr(self, key)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
            ):
                raise ValueError(f"{key}={value!r}: expected a finite number")
        if self.tau <= 0:
            raise ValueError(f"tau={self.tau!r}: expected a number above 0")
        if self.lower < 0:
            raise ValueError(
                f"lower={self.lower!r}: expected 0 or more, a negative weight reverses the update"
            )
        if self.upper < self.lower:
            raise ValueError(f"upper={self.upper!r}: expected lower={self.lower!r} or more")
        if self.shaping == "reverse" and self.upper > 2:
            raise ValueError(
                f"upper={self.upper!r}: expected 2 or less with shaping=reverse (2 - w < 0)"
            )
        for key, largest in _UP_TO.items():
            value = getattr(self, key)
            if not 0 <= value <= largest:
                raise ValueError(f"{key}={value!r}: expected a number from 0 to {largest:g}")
        if self.shaping == "ar" and self.placement != "outside":
            raise ValueError(
                f"placement={self.placement!r}: expected 'outside' with shaping=ar, which "
                "reweights the advantage and not the ratio"
            )
        if self.normalize and "entropy" in SHAPINGS[self.shaping].uses:
            raise ValueError(
                f"normalize={self.normalize!r}: expected null with shaping={self.shaping}, whose "
                "mean is known only after the update has seen every token"
            )
        self._check_not_constant()

    def _check_choice(self, key: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, key)
        if value not in choices:
            raise ValueError(f"{key}={value!r}: expected one of {', '.join(map(str, choices))}")

    def _check_not_constant(self) -> None:
        if self.allow_constant or self.shaping == "uniform":
            return
        low, high = weight_bounds(self)
        if high - low <= CONSTANT_TOLERANCE:
            raise ConstantWeightError(
                f"shaping={self.shaping} form={self.form} alpha={self.alpha} mu={self.mu} "
                f"tau={self.tau} lower={self.lower} upper={self.upper}: every token would get the "
                f"weight {low:g}, which is plain GRPO{'' if low == 1 else ' at another scale'}; "
                f"expected a weight that varies with p, or allow_constant=true to run it anyway"
            )


class WeightRange(NamedTuple):
    """What a weighting can do, over p in [0, 1]; see ``weight_range``."""

    min: float
    max: float
    dead_zone_p: float | None

    @property
    def constant(self) -> bool:
        return self.max - self.min <= CONSTANT_TOLERANCE


class DeadZones(NamedTuple):
    """(first, last) p without a policy gradient at r = 1, or None; see ``dead_zones``."""

    positive: tuple[float, float] | None
    negative: tuple[float, float] | None


def token_weights(
    log_probs_BT: Tensor,
    cfg: TokenWeightConfig,
    mask_BT: Tensor | None = None,
    *,
    mean_weight: Tensor | float | None = None,
    context: TokenContext | None = None,
) -> Tensor:
    """Weights [B, T] of sampled tokens from their log-probabilities, without a gradient.

    Computed in float32, or in float64 for float64 input. p is exp(log-prob) held to [0, 1], so 0,
    -1e4, -inf and rounding above 0 all give a finite weight. Where mask_BT is 0 the
    log-probability is not read and the weight there has no meaning.

    With ``cfg.normalize="batch_mean"`` the weights are divided by ``mean_weight``, or by the mean
    over the masked tokens at hand when that is None. Gradient accumulation and data parallelism
    need the mean over the whole optimizer step to stay exact: add ``weight_sum_and_count`` over
    the shards and pass the quotient. The attainable range then depends on the data.
    ``mean_weight`` is not used without normalisation. context: what else the weighting reads
    (``SHAPINGS[name].uses``); ``ValueError`` where that is missing.
    """
    raw_BT = unnormalized_weights(log_probs_BT, cfg, mask_BT, context=context)
    return normalize_weights(raw_BT, cfg, mask_BT, mean_weight=mean_weight)


def unnormalized_weights(
    log_probs_BT: Tensor,
    cfg: TokenWeightConfig,
    mask_BT: Tensor | None = None,
    *,
    context: TokenContext | None = None,
) -> Tensor:
    """``token_weights`` before normalisation: within ``weight_bounds(cfg)`` unless NaN."""
    log_p_BT = log_probs_BT.detach()
    if mask_BT is not None:
        log_p_BT = log_p_BT.masked_fill(mask_BT == 0, 0.0)
    if log_p_BT.dtype != torch.float64:
        log_p_BT = log_p_BT.float()
    shaping = SHAPINGS[cfg.shaping]
    return shaping.weigh(log_p_BT.clamp(max=0.0).exp(), cfg, context or TokenContext())


def normalize_weights(
    weights_BT: Tensor,
    cfg: TokenWeightConfig,
    mask_BT: Tensor | None = None,
    *,
    mean_weight: Tensor | float | None = None,
) -> Tensor:
    """Divides by the mean weight if cfg says so; returns the input itself if not."""
    if cfg.normalize is None:
        return weights_BT
    if mean_weight is None:
        total, count = _sum_and_count(weights_BT, mask_BT)
        mean_weight = torch.where(total > 0, total / count.clamp(min=1), 1.0).to(weights_BT.dtype)
    return weights_BT / mean_weight


def weight_sum_and_count(
    log_probs_BT: Tensor,
    cfg: TokenWeightConfig,
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


def weight_range(cfg: TokenWeightConfig, eps_high: float = 0.24) -> WeightRange:
    """(min, max, dead_zone_p) of the unnormalised weight over p in [0, 1].

    dead_zone_p is the smallest p whose token with A > 0 has no policy gradient even on-policy (r
    = 1): the weight sits inside the clip and w(p) > 1 + eps_high. None where no p does that, and
    always with placement ``outside``. Published constants, product form: (1.0, 1.4, 0.2112).
    Extremes of a shaping that is not monotone are found on a grid of 1/1024. With
    ``normalize="batch_mean"`` the training weight is this one divided by a mean that depends on
    the data, and the dead zone moves with it.
    """
    low, high = weight_bounds(cfg)
    positive = dead_zones(cfg, eps_high=eps_high).positive
    return WeightRange(low, high, None if positive is None else positive[0])


def dead_zones(cfg: TokenWeightConfig, eps_low: float = 0.2, eps_high: float = 0.24) -> DeadZones:
    """Where a token has no policy gradient even on-policy (r = 1), per sign of its advantage.

    With the weight inside the clip that is w(p) > 1 + eps_high for A > 0, and w(p) < 1 - eps_low
    for A < 0: such tokens are never pushed down. Product form, published constants:
    ((0.2112, 1.0), None); with the (0.5, 1.5) of Table 7: ((0.2112, 1.0), (0.0, 0.0688)). None
    too for a weighting that is no function of p: there the training metrics tell.
    """
    if cfg.placement == "outside" or not is_curve(cfg):
        return DeadZones(None, None)
    return DeadZones(
        _interval(cfg, lambda w: w > 1 + eps_high), _interval(cfg, lambda w: w < 1 - eps_low)
    )


def dual_clip_zone(cfg: TokenWeightConfig, dual_clip: float | None) -> tuple[float, float] | None:
    """(first, last) p where dual clip leaves a token with A < 0 no policy gradient at r = 1.

    With the weight inside the clip that is w(p) > dual_clip. None where no p does that, without a
    dual clip, and where ``dead_zones`` gives None.
    """
    if dual_clip is None or cfg.placement == "outside" or not is_curve(cfg):
        return None
    return _interval(cfg, lambda w: w > dual_clip)


def uniform_mean(cfg: TokenWeightConfig) -> float | None:
    """Mean of the unnormalised weight over p uniform on (0, 1), at r = 1.

    Trapezoidal rule over 65,536 intervals. A property of the curve and not of any policy, whose
    tokens crowd near p = 1: a run's own mean is its metric ``weight_mean``. None where the weight
    also depends on what no uniform p gives (``stapo``). Published constants, product form: 1.3192.
    """
    mean = SHAPINGS[cfg.shaping].mean
    if mean is not None:
        return mean(cfg)
    if not is_curve(cfg):
        return None
    p = _grid(0.0, 1.0, _MEAN_POINTS)
    return float(torch.trapezoid(_curve(p, cfg), p))


def is_curve(cfg: TokenWeightConfig) -> bool:
    """Whether the weight is a function of p alone, so that a curve shows it."""
    return not SHAPINGS[cfg.shaping].uses


@functools.lru_cache(maxsize=256)
def weight_bounds(cfg: TokenWeightConfig) -> tuple[float, float]:
    """(min, max) of the unnormalised weight over p in [0, 1] and whatever else it reads."""
    bounds = SHAPINGS[cfg.shaping].bounds
    if bounds is not None:
        return bounds(cfg)
    weights = _curve(_grid(0.0, 1.0), cfg)
    return float(weights.min()), float(weights.max())


def _curve(p: Tensor, cfg: TokenWeightConfig) -> Tensor:
    return SHAPINGS[cfg.shaping].weigh(p, cfg, TokenContext())


def _grid(start: float, end: float, points: int = _GRID_POINTS) -> Tensor:
    return torch.linspace(start, end, points, dtype=torch.float64, device="cpu")


def _interval(
    cfg: TokenWeightConfig, is_dead: Callable[[Tensor], Tensor]
) -> tuple[float, float] | None:
    first, last = (_first(cfg, is_dead, start, end) for start, end in ((0.0, 1.0), (1.0, 0.0)))
    return None if first is None or last is None else (first, last)


def _first(
    cfg: TokenWeightConfig, is_dead: Callable[[Tensor], Tensor], start: float, end: float
) -> float | None:
    """The first p on the way from start to end with is_dead(w(p)), to about 1e-12; p is dead."""
    for _ in range(4):
        grid = _grid(start, end)
        dead = is_dead(_curve(grid, cfg)).nonzero()
        if len(dead) == 0:
            return None
        index = int(dead[0])
        if index == 0:
            return start
        start, end = float(grid[index - 1]), float(grid[index])
    return end
