"""The weight that a recipe's policy loss gives a token, and where a token has no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sg_rlhf.algo.analysis.gradient_dead_zones import DeadZone, reached_zones
from sg_rlhf.algo.objectives import Objective, check_objective
from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.weightings import Weighting
from sg_rlhf.config import Config, ConfigError, weighting_of
from sg_rlhf.config.recipe_listing import losses
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES
from sg_rlhf.config.weighting_resolution import built_objective, check_update

PAPER_CLIP = (0.2, 0.24)


def clip_range(config: Config) -> tuple[float, float]:
    """(eps_low, eps_high) of the run; the paper's if neither a recipe nor an override is given."""
    keys = ("actor.eps_clip_low_high", "actor.eps_clip")
    if not config.sources and not any(key in config.values for key in keys):
        return PAPER_CLIP
    return config.clip_range()


@dataclass(frozen=True)
class RecipeLoss:
    """A recipe's policy loss, as far as it concerns one token.

    loss: ``actor.policy_loss_type``. objective and weighting: what it maximises, and its token
    weights; None for a loss of upstream, which is upstream's own code and has no weights.
    dual_clip: None without one. kl: ``algo.kl.estimator``; None where neither a recipe nor an
    override is given. kl_weighting: the weights of a KL that weights tokens where the loss does
    not. lopti_threshold: of p_old; None for a single update. correction: level, mode, gating and
    threshold of ``algo.rollout_correction``; None where it is off.
    """

    loss: str
    objective: Objective | None
    weighting: Weighting | None
    eps_low: float
    eps_high: float
    dual_clip: float | None
    kl: str | None
    kl_weighting: Weighting | None
    lopti_threshold: float | None
    correction: tuple[str, str, str, tuple[float, float]] | None

    @classmethod
    def of(cls, config: Config, *, allow_constant: bool | None = None) -> RecipeLoss:
        """The loss that ``config`` trains with; without any recipe, the published weighting.

        Raises:
            ConfigError: settings that training would refuse.
        """
        loss = _chosen(config, "actor.policy_loss_type", "weighted_ppo")
        eps_low, eps_high = clip_range(config)
        is_ours = loss in POLICY_LOSS_TYPES
        check_update(config.sg.update, loss)
        kl = _chosen(config, "algo.kl.estimator", None)
        weighting = None
        if is_ours or kl in KL_ESTIMATORS:
            weighting = weighting_of(config, allow_constant=allow_constant)
        objective = built_objective(loss, config.sg.objective) if is_ours else None
        if objective is not None and weighting is not None:
            _check_placement(objective, weighting)
        return cls(
            loss=loss,
            objective=objective,
            weighting=weighting if is_ours else None,
            eps_low=eps_low,
            eps_high=eps_high,
            dual_clip=config.value("actor.dual_clip"),
            kl=kl,
            kl_weighting=None if is_ours else weighting,
            lopti_threshold=config.sg.lopti_threshold if config.sg.update == "lopti" else None,
            correction=_correction(config),
        )

    @property
    def is_weighted_ppo(self) -> bool:
        return self.loss == "weighted_ppo"

    def limits(self) -> tuple[float, float]:
        """(min, max) of the weight before normalisation."""
        return (1.0, 1.0) if self.weighting is None else self.weighting.bounds()

    def mean(self) -> float | None:
        """Mean of the weight over p uniform on (0, 1); see ``Weighting.uniform_mean``."""
        return 1.0 if self.weighting is None else self.weighting.uniform_mean()

    def is_curve(self) -> bool:
        return self.weighting is None or self.weighting.is_curve

    def weights(self, log_probs: Sequence[float]) -> list[float]:
        """w of each token at ratio 1, before normalisation, in float64; where ``is_curve()``."""
        import torch

        from sg_rlhf.algo.token_weights import token_weights

        if self.weighting is None:
            return [1.0] * len(log_probs)
        cfg = replace(self.weighting, normalize=None, allow_constant=True, probability="trainer")
        weights = token_weights(torch.tensor(log_probs, dtype=torch.float64), cfg)
        return [float(w) for w in weights]

    def dead_zones(self) -> list[DeadZone]:
        """The dead zones before normalisation (see ``algo.analysis.gradient_dead_zones``)."""
        if self.weighting is None:
            return []
        return reached_zones(self.weighting, self.eps_low, self.eps_high, self.dual_clip)

    def describe(self) -> str:
        """One line: which loss with which weights this is."""
        about = losses().get(self.loss, "not ours")
        if self.weighting is None:
            return f"policy loss {self.loss}: no token weights, w = 1; {about}"
        text = self.weighting.describe()
        if self.is_weighted_ppo:
            is_grpo = self.weighting.constant_by_name and self.lopti_threshold is None
            return text + (" (plain GRPO)" if is_grpo else "")
        return f"policy loss {self.loss}: {about}; {text}"


def _correction(config: Config) -> tuple[str, str, str, tuple[float, float]] | None:
    names = ("level", "mode", "gating", "threshold")
    level, mode, gating, (low, high) = (
        config.value(f"algo.advantage.is_correction_{name}") for name in names
    )
    return None if level in (None, False, "off") else (level, mode, gating, (low, high))


def _chosen(config: Config, key: str, otherwise: Any) -> Any:
    """The value that a run uses; ``otherwise`` if neither a recipe nor an override is given."""
    if not config.sources and key not in config.values:
        return otherwise
    return config.value(key)


def _check_placement(objective: Objective, weighting: Weighting) -> None:
    try:
        check_objective(objective, weighting)
    except ParameterError as error:
        raise ConfigError(f"sg.weighting.{error}") from error


def describe_loss(config: Config) -> str:
    """The effects of the token weighting, as the start of a run prints them."""
    rule = RecipeLoss.of(config)
    weighting = rule.weighting
    if weighting is None:
        return f"policy loss: {rule.loss} (upstream's own; no token weights)"
    low, high = rule.limits()
    name = weighting.label.replace(", ", " ").removesuffix(" form")
    text = f"token weights: {name}, {low:g} to {high:g}, {weighting.placement} the clip"
    if not rule.is_weighted_ppo:
        text = f"policy loss: {rule.loss}; {text}"
    if rule.lopti_threshold is not None:
        text += f"\ntwo updates: tokens with p_old < {rule.lopti_threshold:g}, then the rest"
    for dead in rule.dead_zones():
        text += f"\nDEAD ZONE: {dead.sentence()} (docs/method.md)"
    return text
