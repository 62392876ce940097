"""Policy objectives: the surrogate of a token, given its ratio, weight and advantage.

To add one: its file, its line below, a recipe in ``configs/algorithms`` and a case in
``tests/unit/algo/test_algorithms.py``. ``actor.policy_loss_type`` names it, and ``sg.objective``
holds its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sg_rlhf.algo.objectives.aspo import ASPO
from sg_rlhf.algo.objectives.base import Clip, Objective, Surrogate, Tokens
from sg_rlhf.algo.objectives.cispo import CISPO
from sg_rlhf.algo.objectives.dppo import DPPOKL, DPPOTV, IPO
from sg_rlhf.algo.objectives.ppo import WeightedPPO
from sg_rlhf.algo.objectives.sapo import SAPO
from sg_rlhf.algo.parameters import ParameterError, find_class, make

if TYPE_CHECKING:
    from sg_rlhf.algo.weightings import Weighting

__all__ = [
    "OBJECTIVES",
    "Clip",
    "Objective",
    "Surrogate",
    "Tokens",
    "check_objective",
    "make_objective",
]

_ALL: tuple[type[Objective], ...] = (WeightedPPO, CISPO, ASPO, SAPO, DPPOTV, DPPOKL, IPO)
OBJECTIVES: dict[str, type[Objective]] = {objective.name: objective for objective in _ALL}


def make_objective(type: str | Objective, parameters: Mapping[str, Any] | None = None) -> Objective:
    """An objective by name or ``package.module:Class``; one that is an instance is returned.

    Raises ParameterError for an unknown name or parameter (with the nearest one) or a bad value.
    """
    if isinstance(type, Objective):
        return type
    return make(find_class(type, OBJECTIVES, Objective), parameters or {})


def check_objective(objective: Objective, weighting: Weighting) -> None:
    """ParameterError for a weight inside the clip, with an objective that has no such clip."""
    if weighting.placement == "inside" and not objective.takes_inside:
        raise ParameterError(
            "placement",
            weighting.placement,
            f"'outside' with {objective.name}, which has no clip that a weight could sit inside of",
        )
