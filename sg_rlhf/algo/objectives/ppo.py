"""The clipped ratio.

``inside`` (arXiv 2511.00066, Eq. 13): J = min(w r A, clip(w r) A). A large weight alone reaches the
clip, so a token with A > 0 and w > 1 + eps_high has no gradient even at r = 1: the dead zone.
``outside``: J = w * min(r A, clip(r) A). The weight scales the gradient and never removes it.

Gradient of J in log pi (Lemma 3.4 for ``inside``):

- ``inside``: w r A, but 0 where A > 0 and w r > 1 + eps_high, or A < 0 and w r < 1 - eps_low;
- ``outside``: w r A, but 0 where A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low.

Exactly at a clip boundary the gradient is the full w r A: both branches of the minimum are equal
there, torch gives each half the gradient, and its clamp passes the gradient at both ends. Exactly
at the dual clip's boundary the constant takes its half, so half remains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sg_rlhf.algo.objectives.base import Clip, Objective, Surrogate, Tokens, nowhere


@dataclass(frozen=True, kw_only=True)
class WeightedPPO(Objective):
    """J = min(w r A, clip(w r) A) inside the clip, w min(r A, clip(r) A) outside it.

    GRPO (arXiv 2402.03300) where w = 1.
    """

    name: ClassVar[str] = "ppo"
    source: ClassVar[str] = "arXiv 2511.00066, Eq. 13"
    takes_inside: ClassVar[bool] = True

    def surrogate(self, tokens: Tokens, clip: Clip) -> Surrogate:
        import torch

        weights_BT, advantages_BT = tokens.weights_BT, tokens.advantages_BT
        x_BT = weights_BT * tokens.ratio_BT if clip.weight_inside else tokens.ratio_BT
        free_BT = x_BT * advantages_BT
        bounded_BT = x_BT.clamp(1 - clip.eps_low, 1 + clip.eps_high) * advantages_BT
        value_BT = torch.min(free_BT, bounded_BT)
        if clip.dual_clip is None:
            dual_clipped_BT = nowhere(value_BT)
        else:
            floor_BT = clip.dual_clip * advantages_BT
            dual_clipped_BT = (advantages_BT < 0) & (floor_BT > value_BT)
            limited_BT = torch.max(value_BT, floor_BT)
            value_BT = torch.where(advantages_BT < 0, limited_BT, value_BT)
        if not clip.weight_inside:
            value_BT = weights_BT * value_BT
        clipped_BT = torch.lt(bounded_BT, free_BT)
        return Surrogate(value_BT, clipped_BT, dual_clipped_BT, clipped_BT | dual_clipped_BT)
