"""The control for the dead zone: zeroes the tokens that Eq. 13 zeroes, and weights none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import choice
from sg_rlhf.algo.weightings.base import TokenContext
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MaskOnly(GrpoSG):
    """w = 0 where GRPO-SG's weight inside the clip leaves no gradient, else 1.

    With v = the weight of GRPO-SG: 0 where A > 0 and v r > 1 + eps_high, or A < 0 and v r < 1 -
    eps_low (arXiv 2511.00066, Eq. 13), as far as the clip does not zero the token at v = 1 anyway.
    What differs from Eq. 13: v never scales a gradient, and a token that v would have kept inside
    the clip is not kept. GRPO for L = U = 1.
    """

    name: ClassVar[str] = "mask_only"
    source: ClassVar[str] = "a control for arXiv 2511.00066, Eq. 13"
    uses: ClassVar[tuple[str, ...]] = ("old_log_probs", "advantages")

    placement: str = choice("outside", ("outside",), "the weight is 0 or 1")

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        if context.eps is None:
            raise ValueError(f"weighting {self.name}: expected eps of the clip, got None")
        low, high = 1 - context.eps[0], 1 + context.eps[1]
        advantages_BT = context.require("advantages", self.name)
        ratio_BT = p_BT / context.old_p(p_BT, self.name)
        weighted_BT = super().weights(p_BT, context) * ratio_BT
        zeroed_BT = (advantages_BT > 0) & (weighted_BT > high) & (ratio_BT <= high)
        zeroed_BT |= (advantages_BT < 0) & (weighted_BT < low) & (ratio_BT >= low)
        return p_BT.new_ones(p_BT.shape).masked_fill(zeroed_BT, 0.0)

    def bounds(self) -> tuple[float, float]:
        return (1.0 if self.lower == self.upper == 1 else 0.0, 1.0)

    def formula(self) -> str:
        return f"w = 0 where v inside the clip leaves no gradient, v of {super().formula()}"

    def levels(self) -> dict[str, float]:
        return {}
