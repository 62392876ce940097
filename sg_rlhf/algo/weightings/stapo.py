from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stapo(Weighting):
    """w = 0 where A > 0, p < prob and the entropy < entropy, else 1 (STAPO, arXiv 2602.15620).

    The mask of rare spurious tokens. The paper sets the entropy threshold by a quantile of the
    batch; here it is a number in nats, so that no token's mask depends on how a batch is cut. The
    token mean is still over all tokens: it differs by the masked share, about 1e-4 in the paper.
    GRPO for prob = 0.
    """

    name: ClassVar[str] = "stapo"
    source: ClassVar[str] = "arXiv 2602.15620"
    uses: ClassVar[tuple[str, ...]] = ("advantages", "entropy")

    prob: float = number(0.002, "tokens less likely than this are masked", least=0.0, most=1.0)
    entropy: float = number(
        0.5, "... where the policy's entropy is below this, in nats, and A > 0", least=0.0
    )

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        advantages_BT = context.require("advantages", self.name)
        entropy_BT = context.require("entropy", self.name)
        spurious_BT = (advantages_BT > 0) & (p_BT < self.prob) & (entropy_BT < self.entropy)
        return p_BT.new_ones(p_BT.shape).masked_fill(spurious_BT, 0.0)

    def bounds(self) -> tuple[float, float]:
        return (0.0 if self.prob > 0 else 1.0, 1.0)
