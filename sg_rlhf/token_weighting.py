"""What a recipe's policy loss does with a token: its weight, and where it has no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sg_rlhf.config import Config, ConfigError, token_weight_config
from sg_rlhf.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES

if TYPE_CHECKING:
    from sg_rlhf.algo.shaping import TokenWeightConfig

PAPER_CLIP = (0.2, 0.24)
EQ_19 = ("grpo_sg", "reverse")  # the shapings that have its constants


def clip_range(config: Config) -> tuple[float, float]:
    """(eps_low, eps_high) of the run; the paper's if neither a recipe nor an override is given."""
    keys = ("actor.eps_clip_low_high", "actor.eps_clip")
    if not config.sources and not any(key in config.values for key in keys):
        return PAPER_CLIP
    return config.clip_range()


class DeadZone(NamedTuple):
    """Tokens without a policy gradient on-policy (r = 1).

    positive: the sign of their advantage, True for A > 0. relation, name and level: the weight
    there, such as w ``>`` ``1 + eps_high`` = 1.24. zone: (first, last) p; None where the weight is
    not a function of p, so that its value alone tells.
    """

    positive: bool
    relation: str
    name: str
    level: float
    zone: tuple[float, float] | None


@dataclass(frozen=True)
class Weighting:
    """What a recipe's policy loss does to a token.

    loss: ``actor.policy_loss_type``. cfg: its token weights; None for a loss of upstream, which has
    none. dual_clip: None without one. kl: ``algo.kl.estimator``; None where neither a recipe nor an
    override is given. kl_cfg: the weights of a KL that weights tokens where the loss does not.
    lopti_threshold: of p_old; None for a single update.
    """

    loss: str
    cfg: TokenWeightConfig | None
    eps_low: float
    eps_high: float
    dual_clip: float | None
    kl: str | None
    kl_cfg: TokenWeightConfig | None
    lopti_threshold: float | None

    @classmethod
    def of(cls, config: Config, *, allow_constant: bool | None = None) -> Weighting:
        """The weighting that ``config`` trains with; without any recipe, the published one.

        Raises:
            ConfigError: what training would not take.
        """
        loss = _chosen(config, "actor.policy_loss_type", "grpo_sg")
        dual_clip = config.value("actor.dual_clip")
        if dual_clip is not None and dual_clip <= 1:
            raise ConfigError(f"actor.dual_clip={dual_clip:g}: expected a number above 1, or null")
        eps_low, eps_high = clip_range(config)
        if eps_low < 0 or eps_high < 0:
            raise ConfigError(
                f"actor.eps_clip_low_high=[{eps_low:g}, {eps_high:g}]: expected 0 or more"
            )
        if config.sg.update == "lopti" and loss not in POLICY_LOSS_TYPES:
            raise ConfigError(
                f"actor.policy_loss_type={loss}: expected one of {', '.join(POLICY_LOSS_TYPES)} "
                "with sg.update=lopti (sg.shaping=uniform is GRPO)"
            )
        kl = _chosen(config, "algo.kl.estimator", None)
        weights = None
        if loss in POLICY_LOSS_TYPES or kl in KL_ESTIMATORS:
            weights = token_weight_config(config, allow_constant=allow_constant)
        if loss == "cispo" and weights is not None:
            _check_cispo(weights)
        return cls(
            loss=loss,
            cfg=weights if loss in POLICY_LOSS_TYPES else None,
            eps_low=eps_low,
            eps_high=eps_high,
            dual_clip=dual_clip,
            kl=kl,
            kl_cfg=None if loss in POLICY_LOSS_TYPES else weights,
            lopti_threshold=config.sg.lopti_threshold if config.sg.update == "lopti" else None,
        )

    def limits(self) -> tuple[float, float]:
        """(min, max) of the weight before normalisation."""
        from sg_rlhf.algo.shaping import weight_bounds

        return (1.0, 1.0) if self.cfg is None else weight_bounds(self.cfg)

    def mean(self) -> float | None:
        """Of the weight over p uniform on (0, 1); see ``shaping.uniform_mean``."""
        from sg_rlhf.algo.shaping import uniform_mean

        return 1.0 if self.cfg is None else uniform_mean(self.cfg)

    def is_curve(self) -> bool:
        """Whether the weight is a function of p alone."""
        from sg_rlhf.algo.shaping import is_curve

        return self.cfg is None or is_curve(self.cfg)

    def dead_zones(self) -> list[DeadZone]:
        """Those that there are, before normalisation; see ``shaping.dead_zones``."""
        if self.cfg is None or self.cfg.placement == "outside":
            return []
        from sg_rlhf.algo import shaping
        from sg_rlhf.algo.weightings import SHAPINGS

        found = [
            DeadZone(True, ">", "1 + eps_high", 1 + self.eps_high, None),
            DeadZone(False, "<", "1 - eps_low", 1 - self.eps_low, None),
        ]
        if self.dual_clip is not None:
            found.append(DeadZone(False, ">", "dual_clip", self.dual_clip, None))
        if self.is_curve():
            zones = [
                *shaping.dead_zones(self.cfg, self.eps_low, self.eps_high),
                shaping.dual_clip_zone(self.cfg, self.dual_clip),
            ]
            pairs = zip(found, zones, strict=False)
            return [dead._replace(zone=zone) for dead, zone in pairs if zone]
        if "advantages" in SHAPINGS[self.cfg.shaping].uses:  # the range says nothing of one sign
            return []
        low, high = self.limits()
        return [d for d in found if (high > d.level if d.relation == ">" else low < d.level)]


def _chosen(config: Config, key: str, otherwise: Any) -> Any:
    """The value that a run has; ``otherwise`` if neither a recipe nor an override is given."""
    if not config.sources and key not in config.values:
        return otherwise
    return config.value(key)


def _check_cispo(cfg: TokenWeightConfig) -> None:
    from sg_rlhf.algo.policy_loss import check_objective

    try:
        check_objective("cispo", cfg)
    except ValueError as error:
        raise ConfigError(f"sg: {error}") from error


def describe_weighting(config: Config) -> str:
    """What the token weighting can do, in the words that the start of a run prints."""
    weighting = Weighting.of(config)
    cfg = weighting.cfg
    if cfg is None:
        return f"policy loss: {weighting.loss} (upstream's own; no token weights)"
    low, high = weighting.limits()
    name = f"{cfg.shaping} {cfg.form}" if cfg.shaping in EQ_19 else cfg.shaping
    text = f"token weights: {name}, {low:g} to {high:g}, {cfg.placement} the clip"
    if weighting.loss != "grpo_sg":
        text = f"policy loss: {weighting.loss}; {text}"
    if weighting.lopti_threshold is not None:
        text += f"\ntwo updates: tokens with p_old < {weighting.lopti_threshold:g}, then the rest"
    for dead in weighting.dead_zones():
        text += (
            f"\nDEAD ZONE: a token with {'positive' if dead.positive else 'negative'} advantage"
            f"{_tokens_of(dead)} has no policy gradient even on-policy, because w {dead.relation} "
            f"{dead.name} = {dead.level:g} (docs/method.md)"
        )
    return text


def _tokens_of(dead: DeadZone) -> str:
    if dead.zone is None:
        return f" and w {dead.relation} {dead.level:g}"
    first, last = dead.zone
    if last == 1:
        return f" and p > {first:.3f}"
    return f" and p < {last:.3f}" if first == 0 else f" and p from {first:.3f} to {last:.3f}"
