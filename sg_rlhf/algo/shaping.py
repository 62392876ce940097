"""Token weights: how strongly each sampled token takes part in the update.

GRPO-SG (arXiv 2511.00066, Eq. 19): ``w = clip(alpha * (sigmoid(f(p)) - mu), L, U)``, where p is the
token's probability under the current policy, held constant in the gradient. Two readings of f:

- ``product``: f(p) = tau * p. The weight spans (0.5, 1.5) before the clip, as App. C.1 says it
  does.
- ``quotient``: f(p) = p / tau, as Eq. 19 is printed. With the published constants every weight is
  below L, so the clip turns all of them into 1.0: plain GRPO. See docs/method.md.

To add a weighting: one function ``(p_BT, cfg) -> w_BT`` and one line in ``SHAPINGS``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

# Weights closer together than this are one weight: float32 could hardly tell them apart.
CONSTANT_TOLERANCE = 1e-6
_GRID_POINTS = 1025


class ConstantWeightError(ValueError):
    """The weight is the same for every token: plain GRPO under another name."""


@dataclass(frozen=True)
class TokenWeightConfig:
    """One token weighting; the defaults are the published constants in the product form.

    shaping: a name in ``SHAPINGS``. form: ``product`` or ``quotient``. alpha, mu, tau, lower (L)
    and upper (U): the constants of Eq. 19. placement: ``inside`` the clip (Eq. 13) or ``outside``
    it. normalize: None, or ``batch_mean`` to divide by the masked mean weight. allow_constant:
    accept a weight that takes a single value.

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
        for key in ("alpha", "mu", "tau", "lower", "upper"):
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


def uniform(p_BT: Tensor, cfg: TokenWeightConfig) -> Tensor:
    """w = 1 exactly: plain GRPO (arXiv 2402.03300). None of the constants is used."""
    return torch.ones_like(p_BT)


def grpo_sg(p_BT: Tensor, cfg: TokenWeightConfig) -> Tensor:
    """w = clip(alpha * (sigmoid(f(p)) - mu), L, U), arXiv 2511.00066 Eq. 19; 1 for L = U = 1."""
    f_BT = p_BT * cfg.tau if cfg.form == "product" else p_BT / cfg.tau
    return (cfg.alpha * (torch.sigmoid(f_BT) - cfg.mu)).clamp(cfg.lower, cfg.upper)


def reverse(p_BT: Tensor, cfg: TokenWeightConfig) -> Tensor:
    """2 - w of GRPO-SG, the ablation of arXiv 2511.00066 App. C.4: likely tokens get less."""
    return 2.0 - grpo_sg(p_BT, cfg)


Shaping = Callable[[Tensor, TokenWeightConfig], Tensor]
SHAPINGS: dict[str, Shaping] = {
    "uniform": uniform,
    "grpo_sg": grpo_sg,
    "reverse": reverse,
}


def token_weights(
    log_probs_BT: Tensor,
    cfg: TokenWeightConfig,
    mask_BT: Tensor | None = None,
    *,
    mean_weight: Tensor | float | None = None,
) -> Tensor:
    """Weights [B, T] of sampled tokens from their log-probabilities, without a gradient.

    Computed in float32, or in float64 for float64 input. p is exp(log-prob) held to [0, 1], so 0,
    -1e4, -inf and rounding above 0 all give a finite weight. Where mask_BT is 0 the
    log-probability is not read and the weight there has no meaning.

    With ``cfg.normalize="batch_mean"`` the weights are divided by ``mean_weight``, or by the mean
    over the masked tokens at hand when that is None. Gradient accumulation and data parallelism
    need the mean over the whole optimizer step to stay exact: add ``weight_sum_and_count`` over
    the shards and pass the quotient. The attainable range then depends on the data.
    ``mean_weight`` is not used without normalisation.
    """
    raw_BT = unnormalized_weights(log_probs_BT, cfg, mask_BT)
    return normalize_weights(raw_BT, cfg, mask_BT, mean_weight=mean_weight)


def unnormalized_weights(
    log_probs_BT: Tensor, cfg: TokenWeightConfig, mask_BT: Tensor | None = None
) -> Tensor:
    """``token_weights`` before normalisation: within ``weight_bounds(cfg)`` unless NaN."""
    log_p_BT = log_probs_BT.detach()
    if mask_BT is not None:
        log_p_BT = log_p_BT.masked_fill(mask_BT == 0, 0.0)
    if log_p_BT.dtype != torch.float64:
        log_p_BT = log_p_BT.float()
    return SHAPINGS[cfg.shaping](log_p_BT.clamp(max=0.0).exp(), cfg)


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
    log_probs_BT: Tensor, cfg: TokenWeightConfig, mask_BT: Tensor | None = None
) -> Tensor:
    """float64 [sum of unnormalised weights, number of tokens], additive over shards.

    For the ``mean_weight`` of ``token_weights``.
    """
    return torch.stack(_sum_and_count(unnormalized_weights(log_probs_BT, cfg, mask_BT), mask_BT))


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
    ((0.2112, 1.0), None); with the (0.5, 1.5) of Table 7: ((0.2112, 1.0), (0.0, 0.0688)).
    """
    if cfg.placement == "outside":
        return DeadZones(None, None)
    return DeadZones(
        _interval(cfg, lambda w: w > 1 + eps_high), _interval(cfg, lambda w: w < 1 - eps_low)
    )


@functools.lru_cache(maxsize=256)
def weight_bounds(cfg: TokenWeightConfig) -> tuple[float, float]:
    """(min, max) of the unnormalised weight over p in [0, 1]."""
    weights = SHAPINGS[cfg.shaping](_grid(0.0, 1.0), cfg)
    return float(weights.min()), float(weights.max())


def _grid(start: float, end: float) -> Tensor:
    return torch.linspace(start, end, _GRID_POINTS, dtype=torch.float64, device="cpu")


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
        dead = is_dead(SHAPINGS[cfg.shaping](grid, cfg)).nonzero()
        if len(dead) == 0:
            return None
        index = int(dead[0])
        if index == 0:
            return start
        start, end = float(grid[index - 1]), float(grid[index])
    return end
