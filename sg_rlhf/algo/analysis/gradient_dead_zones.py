"""Where a token weight leaves a token without a policy gradient."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sg_rlhf.algo.weightings import Weighting
from sg_rlhf.algo.weightings.base import grid

if TYPE_CHECKING:
    from torch import Tensor


class DeadZones(NamedTuple):
    """(first, last) p without a policy gradient at r = 1, or None; see ``dead_zones``."""

    positive: tuple[float, float] | None
    negative: tuple[float, float] | None


class DeadZone(NamedTuple):
    """Tokens without a policy gradient on-policy (r = 1).

    Attributes:
        relation: ``>`` or ``<``; with ``name`` and ``level`` the condition on the weight, such as
            w > 1 + eps_high = 1.24.
        zone: (first, last) p; None if the weight is not a function of p alone.
        gaps: whether some p in the zone does have a gradient (a weight that rises and falls).
    """

    positive: bool
    relation: str
    name: str
    level: float
    zone: tuple[float, float] | None
    gaps: bool = False

    @property
    def kind(self) -> str:
        """``positive``, ``negative`` or ``dual_clip``: a weighting has at most one of each."""
        if self.positive:
            return "positive"
        return "negative" if self.relation == "<" else "dual_clip"

    def holds(self, weight: float) -> bool:
        """Whether a token of this weight is one of them."""
        return weight > self.level if self.relation == ">" else weight < self.level

    def sentence(self) -> str:
        """One sentence on what it means for a run."""
        return (
            f"a token with {'positive' if self.positive else 'negative'} advantage"
            f"{self._tokens()} has no policy gradient even on-policy, because w {self.relation} "
            f"{self.name} = {self.level:g}"
        )

    def _tokens(self) -> str:
        if self.zone is None:
            return f" and w {self.relation} {self.level:g}"
        first, last = self.zone
        if self.gaps:
            return f", p from {first:.3f} to {last:.3f} and w {self.relation} {self.level:g}"
        if last == 1:
            return f" and p > {first:.3f}"
        return f" and p < {last:.3f}" if first == 0 else f" and p from {first:.3f} to {last:.3f}"


def dead_zones(cfg: Weighting, eps_low: float = 0.2, eps_high: float = 0.24) -> DeadZones:
    """Where a token has no policy gradient even on-policy (r = 1), per sign of its advantage.

    With the weight inside the clip that is w(p) > 1 + eps_high for A > 0, and w(p) < 1 - eps_low
    for A < 0: such tokens are never pushed down. Product form, published constants:
    ((0.2112, 1.0), None); with the (0.5, 1.5) of Table 7: ((0.2112, 1.0), (0.0, 0.0688)). None
    too for a weighting that is no function of p: there the training metrics tell. With
    ``normalize="batch_mean"`` the weight here is not yet divided by its mean.
    """
    if cfg.placement == "outside" or not cfg.is_curve:
        return DeadZones(None, None)
    return DeadZones(
        _interval(cfg, lambda w: w > 1 + eps_high),
        _interval(cfg, lambda w: w < 1 - eps_low),
    )


def dual_clip_zone(cfg: Weighting, dual_clip: float | None) -> tuple[float, float] | None:
    """(first, last) p where dual clip leaves a token with A < 0 no policy gradient at r = 1.

    With the weight inside the clip that is w(p) > dual_clip. None where no p does that, without a
    dual clip, and where ``dead_zones`` gives None.
    """
    if dual_clip is None or cfg.placement == "outside" or not cfg.is_curve:
        return None
    return _interval(cfg, lambda w: w > dual_clip)


def clip_levels(
    cfg: Weighting, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> list[DeadZone]:
    """The limits beyond which a weight zeroes a gradient at r = 1; None outside the clip."""
    if cfg.placement == "outside":
        return []
    levels = [
        DeadZone(True, ">", "1 + eps_high", 1 + eps_high, None),
        DeadZone(False, "<", "1 - eps_low", 1 - eps_low, None),
    ]
    if dual_clip is not None:
        levels.append(DeadZone(False, ">", "dual_clip", dual_clip, None))
    return levels


def reached_zones(
    cfg: Weighting, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> list[DeadZone]:
    """The limits of :func:`clip_levels` that the unnormalised weight reaches."""
    levels = clip_levels(cfg, eps_low, eps_high, dual_clip)
    if not levels:
        return []
    if cfg.is_curve:
        zones = [*dead_zones(cfg, eps_low, eps_high), dual_clip_zone(cfg, dual_clip)]
        return [_over(cfg, dead, zone) for dead, zone in zip(levels, zones, strict=False) if zone]
    if "advantages" in cfg.uses:  # the range says nothing about one sign
        return []
    low, high = cfg.bounds()
    return [dead for dead in levels if dead.holds(high if dead.relation == ">" else low)]


def _over(cfg: Weighting, dead: DeadZone, zone: tuple[float, float]) -> DeadZone:
    inside = cfg.curve(grid(*zone)).tolist()
    return dead._replace(zone=zone, gaps=not all(map(dead.holds, inside)))


class DeadZoneWarning(UserWarning):
    """Some tokens never have a policy gradient in the first update after a rollout."""


@functools.lru_cache(maxsize=256)
def warn_once(
    cfg: Weighting, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> None:
    """Warn of the dead zones of a loss, once for each weighting and clip."""
    for dead in reached_zones(cfg, eps_low, eps_high, dual_clip):
        warnings.warn(
            f"dead zone of the weighting {cfg.name}: {dead.sentence()}; placement='outside' has "
            "none (docs/method.md)",
            DeadZoneWarning,
            stacklevel=3,
        )


def _interval(cfg: Weighting, is_dead: Callable[[Tensor], Tensor]) -> tuple[float, float] | None:
    ends = ((0.0, 1.0), (1.0, 0.0))
    first, last = (_first(cfg, is_dead, start, end) for start, end in ends)
    return None if first is None or last is None else (first, last)


def _first(
    cfg: Weighting, is_dead: Callable[[Tensor], Tensor], start: float, end: float
) -> float | None:
    """The first p on the way from start to end with is_dead(w(p)), to about 1e-12; p is dead."""
    for _ in range(4):
        points = grid(start, end)
        dead = is_dead(cfg.curve(points)).nonzero()
        if len(dead) == 0:
            return None
        index = int(dead[0])
        if index == 0:
            return start
        start, end = float(points[index - 1]), float(points[index])
    return end
