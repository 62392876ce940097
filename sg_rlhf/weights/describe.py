"""What a recipe's policy loss does with a token: its weight, and where it has no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sg_rlhf.config import Config, ConfigError, token_weight_config
from sg_rlhf.config.algorithms import LOSSES
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES

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

    @property
    def kind(self) -> str:
        """``positive``, ``negative`` or ``dual_clip``: a weighting has at most one of each."""
        if self.positive:
            return "positive"
        return "negative" if self.relation == "<" else "dual_clip"

    def holds(self, weight: float) -> bool:
        """Whether a token of this weight is one of them."""
        return weight > self.level if self.relation == ">" else weight < self.level


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

    def weights(self, log_probs: Sequence[float]) -> list[float]:
        """w of each token at ratio 1, before normalisation, in float64; where ``is_curve()``."""
        import torch

        from sg_rlhf.algo.shaping import token_weights

        if self.cfg is None:
            return [1.0] * len(log_probs)
        cfg = replace(self.cfg, normalize=None, allow_constant=True)
        weights = token_weights(torch.tensor(log_probs, dtype=torch.float64), cfg)
        return [float(w) for w in weights]

    def zeroed(self, weights: Sequence[float], advantage: float) -> list[bool]:
        """Which tokens of these weights have no policy gradient on-policy; see ``dead_zones``."""
        dead = [d for d in self._bounds() if (advantage > 0 if d.positive else advantage < 0)]
        return [w == 0 or any(bound.holds(w) for bound in dead) for w in weights]

    def _bounds(self) -> list[DeadZone]:
        """What zeroes a token by its weight, whether or not a weight reaches it."""
        if self.cfg is None or self.cfg.placement == "outside":
            return []
        found = [
            DeadZone(True, ">", "1 + eps_high", 1 + self.eps_high, None),
            DeadZone(False, "<", "1 - eps_low", 1 - self.eps_low, None),
        ]
        if self.dual_clip is not None:
            found.append(DeadZone(False, ">", "dual_clip", self.dual_clip, None))
        return found

    def dead_zones(self) -> list[DeadZone]:
        """Those that there are, before normalisation; see ``shaping.dead_zones``."""
        found = self._bounds()
        if self.cfg is None or not found:
            return []
        from sg_rlhf.algo import shaping
        from sg_rlhf.algo.weightings import SHAPINGS

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
        return [dead for dead in found if dead.holds(high if dead.relation == ">" else low)]

    def describe(self) -> str:
        """One line: which weighting this is."""
        if self.cfg is None:
            about = LOSSES.get(self.loss, "not ours")
            return f"policy loss {self.loss}: no token weights, w = 1; {about}"
        if self.loss == "grpo_sg":
            is_grpo = self.lopti_threshold is None
            return describe_weights(self.cfg, " (plain GRPO)" if is_grpo else "")
        return f"policy loss {self.loss}: {LOSSES[self.loss]}; {describe_weights(self.cfg)}"


def own_parameters(cfg: TokenWeightConfig) -> dict[str, Any]:
    """The settings that only this shaping has, such as ``ar_alpha`` of ``ar``."""
    names = [field.name for field in fields(cfg) if field.name.startswith(f"{cfg.shaping}_")]
    return {name: getattr(cfg, name) for name in names}


def describe_weights(cfg: TokenWeightConfig, remark: str = "") -> str:
    """One line: the token weights; ``remark`` follows those that are all 1."""
    from sg_rlhf.algo.weightings import SHAPINGS

    if cfg.shaping == "uniform":
        return f"uniform: w = 1{remark}"
    where = f"{cfg.placement} the PPO clip"
    if cfg.shaping not in EQ_19:
        values = [f"{name} = {value:g}" for name, value in own_parameters(cfg).items()]
        summary = SHAPINGS[cfg.shaping].summary.rstrip(".")
        return f"{cfg.shaping}: " + ", ".join([summary, *values, where])
    inner = "sigmoid(tau*p)" if cfg.form == "product" else "sigmoid(p/tau)"
    name = "2 - w with w" if cfg.shaping == "reverse" else "w"
    return (
        f"{cfg.shaping}, {cfg.form} form: {name} = clip({cfg.alpha:g}*({inner} - {cfg.mu:g}), "
        f"{cfg.lower:g}, {cfg.upper:g}), tau = {cfg.tau:g}, {where}"
    )


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
