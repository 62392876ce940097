from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import number
from sg_rlhf.algo.weightings.matched import Matched

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Power(Matched):
    """w = a + b * p^k, k = exponent, with the mean and variance of GRPO-SG's weight.

    Asked for by the reviews of the method's earlier version; ``linear`` for k = 1. GRPO for L = U =
    1.
    """

    name: ClassVar[str] = "power"
    source: ClassVar[str] = "a control for arXiv 2511.00066, Eq. 19"

    exponent: float = number(2.0, "k", above=0.0)

    def g(self, p: Tensor) -> Tensor:
        return p**self.exponent

    def formula(self) -> str:
        a, b = self.coefficients()
        return (
            f"w = {a:.4g} + {b:.4g}*p^{self.exponent:g}, mean and variance of {super().formula()}"
        )
