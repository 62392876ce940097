"""The names under which scripts know the token weights; their code is in other modules.

New code says ``make_weighting("grpo_sg", {"tau": 9.0})`` or constructs the class itself
(``sg_rlhf.algo.weightings``).
"""

from __future__ import annotations

from typing import Any

from sg_rlhf.algo.analysis.gradient_dead_zones import (
    DeadZones,
    WeightRange,
    dead_zones,
    dual_clip_zone,
    weight_range,
)
from sg_rlhf.algo.token_weights import (
    normalize_weights,
    token_weights,
    unnormalized_weights,
    weight_sum_and_count,
)
from sg_rlhf.algo.weightings import CONSTANT_TOLERANCE, ConstantWeightError, Weighting
from sg_rlhf.algo.weightings.short_forms import from_short_forms

__all__ = [
    "CONSTANT_TOLERANCE",
    "ConstantWeightError",
    "DeadZones",
    "TokenWeightConfig",
    "WeightRange",
    "dead_zones",
    "dual_clip_zone",
    "normalize_weights",
    "token_weights",
    "unnormalized_weights",
    "weight_range",
    "weight_sum_and_count",
]


def TokenWeightConfig(shaping: str = "grpo_sg", **settings: Any) -> Weighting:
    """The weighting of flat settings (``tau=9.0``, ``upper=1.2``, ``ar_alpha=0.3``, ...).

    Settings that belong to another weighting than ``shaping`` are not read. Raises ``ValueError``
    for a value out of range, ``ConstantWeightError`` for a weight that is the same for every token.
    """
    return from_short_forms(shaping, settings)
