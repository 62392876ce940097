"""What a run's own configuration does to a token of probability p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sg_rlhf.algo.shaping import (
    DeadZones,
    TokenWeightConfig,
    dead_zones,
    token_weights,
    weight_bounds,
)
from sg_rlhf.config import ConfigError, token_weight_config
from sg_rlhf.report.runs import Run

#: Losses whose token weight is the one of ``sg``; a stock ``ppo`` has none.
WEIGHTED_LOSSES = ("grpo_sg",)


@dataclass(frozen=True)
class Weighting:
    """The token weights of a run.

    Attributes:
        config: None where a weight cannot be computed from p alone.
        label: one line, for people; where config is None it says why.
    """

    config: TokenWeightConfig | None
    eps_low: float
    eps_high: float
    label: str

    def weights(self, log_probs: list[float]) -> list[float]:
        """w of each token; only where ``config`` is known."""
        assert self.config is not None
        tensor = torch.tensor(log_probs, dtype=torch.float64)
        return [float(w) for w in token_weights(tensor, self.config)]

    def zeroed(self, weights: list[float], advantage: float) -> list[bool]:
        """Tokens without a policy gradient at ratio 1: the rule of ``algo.shaping.dead_zones``."""
        assert self.config is not None
        if self.config.placement == "outside":
            return [False] * len(weights)
        if advantage > 0:
            return [w > 1 + self.eps_high for w in weights]
        if advantage < 0:
            return [w < 1 - self.eps_low for w in weights]
        return [False] * len(weights)

    def bounds(self) -> tuple[float, float]:
        """Smallest and largest weight over p in [0, 1]."""
        assert self.config is not None
        return weight_bounds(self.config)

    def zones(self) -> DeadZones:
        """Where the policy gradient is gone at ratio 1."""
        assert self.config is not None
        return dead_zones(self.config, self.eps_low, self.eps_high)


def weighting_of(run: Run) -> Weighting:
    """The weighting that a run's config.yaml describes."""
    if run.config is None:
        return _unknown("not known: no usable config.yaml")
    loss = str(run.config.value("actor.policy_loss_type"))
    low, high = run.config.clip_range()
    if loss == "ppo":
        return Weighting(
            TokenWeightConfig(shaping="uniform"), low, high, "none: loss ppo (every w = 1)"
        )
    if loss not in WEIGHTED_LOSSES:
        return _unknown(f"n/a: policy loss {loss} is not weighted by p alone", low, high)
    try:
        cfg = token_weight_config(run.config, allow_constant=True)
    except ConfigError as error:
        return _unknown(f"n/a: {error}", low, high)
    try:
        token_weights(torch.zeros(1), cfg)
    except ValueError:  # it reads more of a token than its probability
        return _unknown(f"n/a: sg.shaping={cfg.shaping} is no function of p alone", low, high)
    if cfg.normalize is not None:
        return _unknown(
            f"n/a: sg.normalize={cfg.normalize} divides by a mean that the samples do not hold",
            low,
            high,
        )
    if cfg.shaping == "uniform":
        return Weighting(cfg, low, high, "uniform: every w = 1 (plain GRPO)")
    inner = "sigmoid(tau p)" if cfg.form == "product" else "sigmoid(p / tau)"
    name = "2 - clip" if cfg.shaping == "reverse" else "clip"
    formula = (
        f"{name}({cfg.alpha:g} ({inner} - {cfg.mu:g}), {cfg.lower:g}, {cfg.upper:g}), "
        f"tau = {cfg.tau:g}"
        if cfg.shaping in ("grpo_sg", "reverse")
        else cfg.shaping
    )
    return Weighting(cfg, low, high, f"w = {formula}, {cfg.placement} the clip")


def _unknown(why: str, low: float = 0.0, high: float = 0.0) -> Weighting:
    return Weighting(None, low, high, why)
