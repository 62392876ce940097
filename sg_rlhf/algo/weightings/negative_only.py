from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import choice, number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NegativeOnly(Weighting):
    """w = positive where A > 0, else 1: negative-sample reinforcement (NSR, arXiv 2506.01347).

    The paper's advantages are +1 and -1; here they are the recipe's. positive = 0.1 is its
    W-REINFORCE. It scales the loss of a token: placement ``outside``. Inside the clip a weight of
    0.1 would let the ratio of a token with A > 0 rise to 12.4. GRPO for positive = 1.
    """

    name: ClassVar[str] = "negative_only"
    source: ClassVar[str] = "arXiv 2506.01347"
    uses: ClassVar[tuple[str, ...]] = ("advantages",)

    placement: str = choice("outside", ("outside",), "it scales the loss, and the clip stays")
    positive: float = number(0.0, "weight of tokens with A > 0", least=0.0)

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        advantages_BT = context.require("advantages", self.name)
        return p_BT.new_ones(p_BT.shape).masked_fill(advantages_BT > 0, self.positive)

    def bounds(self) -> tuple[float, float]:
        return (min(self.positive, 1.0), max(self.positive, 1.0))
