from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Uniform(Weighting):
    """w = 1: plain GRPO (arXiv 2402.03300)."""

    name: ClassVar[str] = "uniform"
    source: ClassVar[str] = "arXiv 2402.03300"
    constant_by_name: ClassVar[bool] = True

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        return p_BT.new_ones(p_BT.shape)
