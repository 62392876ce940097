from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sg_rlhf.algo.objectives.base import Clip, Objective, Surrogate, Tokens, nowhere, scaled


@dataclass(frozen=True, kw_only=True)
class CISPO(Objective):
    """The gradient is w clip(r) A: the ratio is clipped and no token (arXiv 2506.13585).

    Eq. 4 there: sg(clip(r)) A log pi, times w. Computed as w * sg(clip(r) / r) * r * A, which has
    the same gradient and is GRPO bit for bit where nothing is clipped. The value differs from the
    paper's (A log pi there), which no optimizer sees.
    """

    name: ClassVar[str] = "cispo"
    source: ClassVar[str] = "arXiv 2506.13585, Eq. 4"

    def surrogate(self, tokens: Tokens, clip: Clip) -> Surrogate:
        ratio_BT = tokens.ratio_BT
        bounded_BT = ratio_BT.detach().clamp(1 - clip.eps_low, 1 + clip.eps_high)
        value_BT = scaled(bounded_BT, tokens)
        return Surrogate(value_BT, bounded_BT != ratio_BT, nowhere(value_BT), nowhere(value_BT))
