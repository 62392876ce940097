"""The positive control: the tokens whose weight in GRPO-SG is below U get no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lab.experiments.forks.gate import VARIES
from sg_rlhf.algo.weightings import TokenContext, Weighting


@dataclass(frozen=True, kw_only=True)
class ZeroLow(Weighting):
    """w = 0 for p < .3272, else 1."""

    source: ClassVar[str] = "lab/experiments/forks_part2/preregistration.md"

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        return (p_BT >= VARIES).to(p_BT.dtype)
