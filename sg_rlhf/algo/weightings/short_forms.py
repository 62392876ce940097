"""The flat names that settings had before each weighting owned its parameters.

Recipes, the weights command and scripts say ``tau`` where ``weighting: {type: grpo_sg, tau: ...}``
is meant, and ``stapo_prob`` for the ``prob`` of ``stapo``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sg_rlhf.algo.weightings import Weighting, weighting_class
from sg_rlhf.algo.weightings.ar import AdvantageReweighting
from sg_rlhf.algo.weightings.grpo_sg import ClippedLogistic, GrpoSG
from sg_rlhf.algo.weightings.random import Random
from sg_rlhf.algo.weightings.stapo import Stapo

#: Flat name -> (the weightings that it belongs to, their parameter).
SHORT_FORMS: dict[str, tuple[type[Weighting], str]] = {
    **{name: (Weighting, name) for name in Weighting.ranges()},
    "form": (GrpoSG, "form"),
    **{name: (ClippedLogistic, name) for name in ("alpha", "mu", "tau", "lower", "upper")},
    "random_spread": (Random, "spread"),
    "random_seed": (Random, "seed"),
    "ar_alpha": (AdvantageReweighting, "alpha"),
    "stapo_prob": (Stapo, "prob"),
    "stapo_entropy": (Stapo, "entropy"),
}


def parameter_of(flat: str, weighting: type[Weighting]) -> str | None:
    """The parameter of this weighting that a flat name stands for; None where it has none."""
    owner, name = SHORT_FORMS[flat]
    return name if issubclass(weighting, owner) else None


def from_short_forms(shaping: str, settings: Mapping[str, Any]) -> Weighting:
    """The weighting of flat settings; those of other weightings are not read.

    Raises:
        ParameterError: as ``make_weighting``; also for a name that is no flat name.
    """
    weighting = weighting_class(shaping)
    parameters = {}
    for flat, value in settings.items():
        if flat not in SHORT_FORMS:
            raise TypeError(f"{flat}: not a setting of a token weighting")
        name = parameter_of(flat, weighting)
        if name is not None:
            parameters[name] = value
    return weighting(**parameters)
