from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.weightings.matched import Matched

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Linear(Matched):
    """w = a + b * p with the mean and variance of GRPO-SG's weight: is it the shape that matters?

    Asked for by the reviews of the method's earlier version. GRPO for L = U = 1.
    """

    name: ClassVar[str] = "linear"
    source: ClassVar[str] = "a control for arXiv 2511.00066, Eq. 19"

    def g(self, p: Tensor) -> Tensor:
        return p

    def formula(self) -> str:
        a, b = self.coefficients()
        return f"w = {a:.4g} + {b:.4g}*p, mean and variance of {super().formula()}"
