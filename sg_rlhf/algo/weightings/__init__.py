"""Token weightings: the factor of each sampled token in the update. One file each.

To add one: its file, its line below, a recipe in ``configs/algorithms`` and a case in
``tests/unit/algo/test_algorithms.py``. One that lives elsewhere needs no line: its type is
``package.module:Class``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sg_rlhf.algo.parameters import ParameterError, find_class, make
from sg_rlhf.algo.weightings.ar import AdvantageReweighting
from sg_rlhf.algo.weightings.base import (
    CONSTANT_TOLERANCE,
    ConstantWeightError,
    TokenContext,
    Weighting,
)
from sg_rlhf.algo.weightings.centred import Centred
from sg_rlhf.algo.weightings.checks import check_class, check_weights
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from sg_rlhf.algo.weightings.linear import Linear
from sg_rlhf.algo.weightings.mask_only import MaskOnly
from sg_rlhf.algo.weightings.negative_only import NegativeOnly
from sg_rlhf.algo.weightings.positive_only import PositiveOnly
from sg_rlhf.algo.weightings.power import Power
from sg_rlhf.algo.weightings.random import Random
from sg_rlhf.algo.weightings.reshape_reversed import ReshapeReversed
from sg_rlhf.algo.weightings.reverse import Reverse
from sg_rlhf.algo.weightings.stapo import Stapo
from sg_rlhf.algo.weightings.stare import Stare
from sg_rlhf.algo.weightings.token_keys import token_keys
from sg_rlhf.algo.weightings.top_entropy import TopEntropy
from sg_rlhf.algo.weightings.uniform import Uniform

__all__ = [
    "CONSTANT_TOLERANCE",
    "WEIGHTINGS",
    "ConstantWeightError",
    "GrpoSG",
    "ParameterError",
    "TokenContext",
    "Uniform",
    "Weighting",
    "make_weighting",
    "token_keys",
    "weighting_class",
]

_ALL: tuple[type[Weighting], ...] = (
    Uniform, GrpoSG, Reverse, Centred, Random, Linear, Power, MaskOnly, NegativeOnly,
    PositiveOnly, AdvantageReweighting, ReshapeReversed, Stapo, Stare, TopEntropy,
)  # fmt: skip
WEIGHTINGS: dict[str, type[Weighting]] = {weighting.name: weighting for weighting in _ALL}


def weighting_class(type: str) -> type[Weighting]:
    """The class of a weighting: a key of :data:`WEIGHTINGS`, or ``package.module:Class``.

    Raises ParameterError with the nearest name, or with what the class lacks.
    """
    cls = find_class(type, WEIGHTINGS, Weighting)
    if cls not in _ALL:
        check_class(type, cls)
    return cls


def make_weighting(type: str | Weighting, parameters: Mapping[str, Any] | None = None) -> Weighting:
    """A weighting by name (:func:`weighting_class`), with its parameters; an instance is returned.

    Raises:
        ParameterError: an unknown name or parameter (with the nearest one), or a bad value.
        ConstantWeightError: every token would get the same weight.
        ValueError: the weights of a class from elsewhere cannot be computed, or are negative.
    """
    if isinstance(type, Weighting):
        return type
    cls, values = weighting_class(type), parameters or {}
    if cls not in _ALL:
        check_weights(make(cls, {**values, "allow_constant": True}))
    return make(cls, values)
