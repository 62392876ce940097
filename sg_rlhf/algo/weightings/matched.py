"""Other increasing weights with the mean and the variance of GRPO-SG's.

Then the shape of the weight is compared, and not its size. Mean and variance depend on how
p is distributed: uniform on (0, 1), or in the 20 (or any number of) equal bins of ``prob_hist``,
such as a run's own histogram ``sg/prob_hist``, uniform within each bin.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import ParameterError, numbers
from sg_rlhf.algo.weightings.base import TokenContext
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG

if TYPE_CHECKING:
    from torch import Tensor

_POINTS = 10_000


@dataclass(frozen=True, kw_only=True)
class Matched(GrpoSG):
    """w = a + b * g(p) with a and b such that mean and variance are those of GRPO-SG's weight."""

    prob_hist: tuple[float, ...] | None = numbers(
        "tokens in equal bins of p that mean and variance are taken over [uniform p]", least=0.0
    )

    def g(self, p: Tensor) -> Tensor:
        """The shape, an increasing function of p."""
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        if self.prob_hist is not None and sum(self.prob_hist) == 0:
            raise ParameterError("prob_hist", self.prob_hist, "a bin that is not empty")
        a, _ = self.coefficients()
        if a < 0:
            raise ValueError(
                f"{self.name}: the matched weight would be {a:g} at p = 0, which reverses the "
                "update; expected a reference with a smaller variance"
            )

    def coefficients(self) -> tuple[float, float]:
        """(a, b)."""
        return _coefficients(self)

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        a, b = self.coefficients()
        return a + b * self.g(p_BT)

    before_clip_label: ClassVar[str] = "the weight that it is matched to"

    def before_clip(self, p: Tensor) -> Tensor:
        """The reference, for a plot."""
        return super().before_clip(p).clamp(self.lower, self.upper)

    def levels(self) -> dict[str, float]:
        return {}

    @property
    def label(self) -> str:
        return self.name


@functools.lru_cache(maxsize=64)
def _coefficients(weighting: Matched) -> tuple[float, float]:
    import torch

    counts = weighting.prob_hist or (1.0,)
    points = -(-_POINTS // len(counts)) * len(counts)
    p = (torch.arange(points, dtype=torch.float64, device="cpu") + 0.5) / points
    share = torch.tensor(counts, dtype=torch.float64).repeat_interleave(points // len(counts))

    def moments(x: Tensor) -> tuple[float, float]:
        mean = (share * x).sum() / share.sum()
        return float(mean), float((share * (x - mean) ** 2).sum() / share.sum())

    reference = weighting.before_clip(p)
    (mean_g, variance_g), (mean, variance) = moments(weighting.g(p)), moments(reference)
    b = (variance / variance_g) ** 0.5 if variance_g > 0 else 0.0
    return mean - b * mean_g, b
