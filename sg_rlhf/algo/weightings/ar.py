from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import choice, number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdvantageReweighting(Weighting):
    """w = a * p_old + 1 - a, a = alpha: advantage reweighting (AR, arXiv 2505.12929).

    It multiplies the advantage, so the clip does not see it: placement ``outside``. p_old is the
    probability under the policy that sampled. GRPO for a = 0.

    The authors' code has a = 0.2 for Knights & Knaves where AR runs alone, and 0.3 together with
    Lopti. The default here is 0.3 in both cases.
    """

    name: ClassVar[str] = "ar"
    source: ClassVar[str] = "arXiv 2505.12929"
    uses: ClassVar[tuple[str, ...]] = ("old_log_probs",)

    placement: str = choice("outside", ("outside",), "it multiplies the advantage, not the ratio")
    alpha: float = number(
        0.3,
        "a (Knights & Knaves: 0.2 alone, 0.3 with Lopti; mathematics: 0.1)",
        least=0.0,
        most=1.0,
    )

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        return self.alpha * context.old_p(p_BT, self.name) + (1.0 - self.alpha)

    def bounds(self) -> tuple[float, float]:
        return (1.0 - self.alpha, 1.0)

    def uniform_mean(self) -> float:
        """At r = 1, where p = p_old."""
        return 1.0 - self.alpha / 2
