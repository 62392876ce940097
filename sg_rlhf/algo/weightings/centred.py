from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import choice
from sg_rlhf.algo.weightings.grpo_sg import ClippedLogistic

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Centred(ClippedLogistic):
    """w = clip(alpha * sigmoid(tau * (p - mu)), L, U): mu as the centre, a third reading of Eq. 19.

    AR-Lopti's code base has such a weight, 2 * sigmoid(k * (p_old - tau)) (arXiv 2505.12929), of
    the old probability; here p is the current one. Outside the clip, as there. GRPO for L = U = 1.
    """

    name: ClassVar[str] = "centred"
    source: ClassVar[str] = "a reading of arXiv 2511.00066, Eq. 19"

    placement: str = choice(
        "outside", ("inside", "outside"), "weight inside the PPO clip or outside it"
    )

    def before_clip(self, p: Tensor) -> Tensor:
        return self.alpha * (self.tau * (p - self.mu)).sigmoid()

    def formula(self) -> str:
        return (
            f"w = clip({self.alpha:g}*sigmoid({self.tau:g}*(p - {self.mu:g})), "
            f"{self.lower:g}, {self.upper:g})"
        )
