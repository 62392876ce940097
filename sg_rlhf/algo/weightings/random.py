from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import integer, number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting
from sg_rlhf.algo.weightings.token_keys import uniform_draws

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Random(Weighting):
    """w ~ U[1 - s, 1 + s], s = spread: noise of the same size, an ablation (TR-GRPO, Table 4).

    Drawn by a hash of the seed and the token's key, so that a token has the same weight in every
    micro-batch, on every rank and in every epoch. GRPO for s = 0.
    """

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "TR-GRPO, Table 4"
    uses: ClassVar[tuple[str, ...]] = ("keys",)

    spread: float = number(0.5, "w is in [1 - spread, 1 + spread]", least=0.0, most=1.0)
    seed: int = integer(0, "of the draws")

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        unit_BT = uniform_draws(context.require("keys", self.name), self.seed)
        return (1.0 + self.spread * (2.0 * unit_BT - 1.0)).to(p_BT.dtype)

    def bounds(self) -> tuple[float, float]:
        return (1.0 - self.spread, 1.0 + self.spread)

    def uniform_mean(self) -> float:
        return 1.0
