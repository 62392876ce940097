"""Which tokens of a logged sample have no policy gradient, and why: by the loss's own functions."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from sg_rlhf.weights.describe import RecipeLoss

if TYPE_CHECKING:
    from torch import Tensor

HAS_GRADIENT = "0"
#: A letter for each reason. The first that holds is given.
REASONS = MappingProxyType(
    {
        "a": "advantage 0",
        "r": "correction: trainer and engine disagree too much",
        "w": "weight 0",
        "d": "dead zone: the weight alone leaves the clip range, at ratio 1",
        "u": "dual clip",
        "c": "clip: the ratio of the update left the clip range",
    }
)


def gradient_reasons(
    rule: RecipeLoss,
    log_probs: Sequence[float],
    advantage: float,
    update_log_probs: Sequence[float] | None = None,
    engine_log_probs: Sequence[float] | None = None,
) -> str:
    """A character per token: ``HAS_GRADIENT``, or one of ``REASONS``.

    Args:
        rule: of the run's recipe, with a weight that is a function of p (``rule.is_curve()``).
        log_probs: [T], under the policy that sampled, as the trainer computes them.
        advantage: of the response.
        update_log_probs: [T], under the policy that was updated; None: the same policy, ratio 1.
        engine_log_probs: [T], as the rollout engine computed them; without, no correction is seen.
    """
    if advantage == 0:
        return "a" * len(log_probs)
    import torch

    from sg_rlhf.algo.objectives import Clip, Tokens
    from sg_rlhf.algo.objectives.ppo import WeightedPPO

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor([list(values)], dtype=torch.float64)

    old_1T = row(log_probs)
    current_1T = old_1T if update_log_probs is None else row(update_log_probs)
    weights_1T = row(rule.weights(current_1T[0].tolist()))
    inside = rule.weighting is not None and rule.weighting.placement == "inside"
    clip = Clip(rule.eps_low, rule.eps_high, rule.dual_clip, inside)
    objective = rule.objective or WeightedPPO()
    advantages_1T = torch.full_like(old_1T, advantage)
    # A loss of upstream has its own ratio (gspo: of the whole response).
    ratio_1T = (current_1T - old_1T).exp() if rule.objective or rule.loss == "ppo" else None
    on_policy = objective.surrogate(
        Tokens(torch.ones_like(old_1T), weights_1T, advantages_1T, current_1T), clip
    )
    taken = on_policy
    if ratio_1T is not None:
        taken = objective.surrogate(Tokens(ratio_1T, weights_1T, advantages_1T, old_1T), clip)
    reasons = {
        "c": taken.zeroed_BT,
        "d": taken.zeroed_BT & on_policy.zeroed_BT,
        "u": taken.dual_clipped_BT,
        "w": weights_1T == 0,
    }
    if engine_log_probs is not None and rule.correction is not None:
        reasons["r"] = _dropped(rule, old_1T, row(engine_log_probs))
    found = [HAS_GRADIENT] * len(log_probs)
    for letter, where_1T in reasons.items():
        for k in where_1T[0].nonzero().flatten().tolist():
            found[k] = letter
    return "".join(found)


def _dropped(rule: RecipeLoss, old_1T: Tensor, engine_1T: Tensor) -> Tensor:
    """Where the correction's coefficient is 0; bool [1, T]."""
    import torch

    from sg_rlhf.algo.rollout_correction import RolloutCorrectionConfig, rollout_correction

    assert rule.correction is not None
    level, mode, gating, threshold = rule.correction
    config = RolloutCorrectionConfig(level, mode, gating, threshold)
    coefficient, _ = rollout_correction(old_1T, engine_1T, torch.ones_like(old_1T), config)
    assert coefficient is not None  # the level is not off
    return (coefficient == 0).expand_as(old_1T)
