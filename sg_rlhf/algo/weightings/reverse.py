from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.weightings.base import TokenContext
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Reverse(GrpoSG):
    """w = 2 - w of GRPO-SG: likely tokens get less, an ablation (TR-GRPO, Table 4).

    GRPO for L = U = 1.
    """

    name: ClassVar[str] = "reverse"
    source: ClassVar[str] = "TR-GRPO, Table 4"

    def check(self) -> None:
        super().check()
        if self.upper > 2:
            raise ParameterError("upper", self.upper, "2 or less with reverse (2 - w < 0)")

    def before_clip(self, p: Tensor) -> Tensor:
        return 2.0 - super().before_clip(p)

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        # Not a clamp of `before_clip`: 2 - clip(x) rounds as GRPO-SG's own weight does.
        return 2.0 - GrpoSG.before_clip(self, p_BT).clamp(self.lower, self.upper)

    def formula(self) -> str:
        return super().formula().replace("w = ", "2 - w with w = ", 1)

    def levels(self) -> dict[str, float]:
        low, high = self.lower, self.upper
        return {f"2 - L = {2 - low:g}": 2 - low, f"2 - U = {2 - high:g}": 2 - high}
