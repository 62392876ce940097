from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sg_rlhf.algo.objectives.base import Clip, Surrogate, Tokens, scaled
from sg_rlhf.algo.objectives.ppo import WeightedPPO
from sg_rlhf.algo.parameters import number


@dataclass(frozen=True, kw_only=True)
class ASPO(WeightedPPO):
    """The gradient is w min(1 / r, cap) A where A > 0: the ratio is inverted (arXiv 2510.06062).

    Tokens with A > 0 that became more likely since they were sampled then count less, and not
    more. Those with r > 1 + eps_high have no gradient, as in PPO; those with A < 0 are PPO's. On
    the policy (r = 1) it is GRPO.

    Two differences from the authors' code. Where A < 0 it has a soft dual clip of 3: beyond it the
    gradient stays, as 3 A. Here dual_clip (10 in the recipes) is hard: beyond it there is none.
    And its clip range depends on the token's entropy (0.2 or 0.4); here it is the recipe's.
    """

    name: ClassVar[str] = "aspo"
    source: ClassVar[str] = "arXiv 2510.06062"
    takes_inside: ClassVar[bool] = False

    cap: float = number(3.0, "largest 1 / r", above=0.0)

    def surrogate(self, tokens: Tokens, clip: Clip) -> Surrogate:
        import torch

        ppo = super().surrogate(tokens, clip)
        ratio_BT, positive_BT = tokens.ratio_BT, tokens.advantages_BT > 0
        scale_BT = (1 / ratio_BT.detach()).clamp(max=self.cap)
        turned_BT = scaled(scale_BT, tokens)
        turned_BT = torch.where(ppo.clipped_BT, turned_BT.detach(), turned_BT)
        value_BT = torch.where(positive_BT, turned_BT, ppo.value_BT)
        return Surrogate(value_BT, ppo.clipped_BT, ppo.dual_clipped_BT, ppo.zeroed_BT)
