"""What a run's own configuration does to a token of probability p."""

from __future__ import annotations

from dataclasses import dataclass

from sg_rlhf.config import ConfigError
from sg_rlhf.report.runs import Run
from sg_rlhf.weights.describe import RecipeLoss


@dataclass(frozen=True)
class RunWeighting:
    """The token weights of a run.

    Attributes:
        rule: gives them; None where they do not follow from what the samples hold.
        label: one line, for people; where rule is None it says why.
    """

    rule: RecipeLoss | None
    label: str


def weighting_of(run: Run) -> RunWeighting:
    if run.config is None:
        return RunWeighting(None, "not known: no usable config.yaml")
    try:
        rule = RecipeLoss.of(run.config, allow_constant=True)
    except ConfigError as error:
        return RunWeighting(None, f"n/a: {error}")
    if not rule.is_curve():
        return RunWeighting(None, f"n/a: no function of p alone: {rule.describe()}")
    if rule.weighting is not None and rule.weighting.normalize is not None:
        why = f"normalize={rule.weighting.normalize} divides by a mean that the samples do not hold"
        return RunWeighting(None, f"n/a: {why}")
    return RunWeighting(rule, rule.describe())
