from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import choice, number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ReshapeReversed(Weighting):
    """w = 1 + c - c * p_old: unlikely tokens get more (arXiv 2603.22117, ``reshape_reversed``).

    The opposite of AR and of GRPO-SG. It multiplies the advantage: placement ``outside``. GRPO for
    c = 0.
    """

    name: ClassVar[str] = "reshape_reversed"
    source: ClassVar[str] = "arXiv 2603.22117"
    uses: ClassVar[tuple[str, ...]] = ("old_log_probs",)

    placement: str = choice("outside", ("outside",), "it multiplies the advantage, not the ratio")
    c: float = number(0.2, "strength (0.2 for Qwen2.5-Math-7B, 0.1 for Qwen3-8B-Base)", least=0.0)

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        return 1.0 + (self.c - self.c * context.old_p(p_BT, self.name))

    def bounds(self) -> tuple[float, float]:
        return (1.0, 1.0 + self.c)

    def uniform_mean(self) -> float:
        """At r = 1, where p = p_old."""
        return 1.0 + self.c / 2
