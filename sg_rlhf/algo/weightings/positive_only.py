from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import choice, number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PositiveOnly(Weighting):
    """w = negative where A < 0, else 1: only responses better than their group (arXiv 2606.16154).

    The mirror of ``negative_only``. The paper's method, WAPO, has more parts: this is its choice of
    responses alone. It scales the loss of a token: placement ``outside``. GRPO for negative = 1.
    """

    name: ClassVar[str] = "positive_only"
    source: ClassVar[str] = "arXiv 2606.16154"
    uses: ClassVar[tuple[str, ...]] = ("advantages",)

    placement: str = choice("outside", ("outside",), "it scales the loss, and the clip stays")
    negative: float = number(0.0, "weight of tokens with A < 0", least=0.0)

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        advantages_BT = context.require("advantages", self.name)
        return p_BT.new_ones(p_BT.shape).masked_fill(advantages_BT < 0, self.negative)

    def bounds(self) -> tuple[float, float]:
        return (min(self.negative, 1.0), max(self.negative, 1.0))
