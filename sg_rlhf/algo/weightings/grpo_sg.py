"""The published weight.

Three readings of f in ``w = clip(alpha * (sigmoid(f(p)) - mu), L, U)`` (arXiv 2511.00066, Eq. 19):
``product``, f = tau * p, spans (0.5, 1.5) before the clip, as App. C.1 says it does; ``quotient``,
f = p / tau, is how the equation is printed, and with the published constants every weight is below
L, so the clip turns all of them into 1: plain GRPO; ``centred``, a weighting of its own, puts mu
inside. docs/method.md compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import ParameterError, choice, number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClippedLogistic(Weighting):
    """The constants of Eq. 19, for those that share them."""

    alpha: float = number(2.0, "scale of the weight, Eq. 19")
    mu: float = number(0.25, "shift of the weight, Eq. 19")
    tau: float = number(9.0, "temperature of the weight, Eq. 19", above=0.0)
    lower: float = number(
        1.0, "L, lower clip of the weight", least=0.0, why="a negative weight reverses the update"
    )
    upper: float = number(1.4, "U, upper clip of the weight", least=0.0)

    def check(self) -> None:
        if self.upper < self.lower:
            raise ParameterError("upper", self.upper, f"lower={self.lower!r} or more")

    def before_clip(self, p: Tensor) -> Tensor:
        raise NotImplementedError

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        return self.before_clip(p_BT).clamp(self.lower, self.upper)

    def levels(self) -> dict[str, float]:
        return {f"L = {self.lower:g}": self.lower, f"U = {self.upper:g}": self.upper}


@dataclass(frozen=True, kw_only=True)
class GrpoSG(ClippedLogistic):
    """w = clip(alpha * (sigmoid(f(p)) - mu), L, U): GRPO-SG (arXiv 2511.00066, Eq. 19).

    f(p) = tau * p (form ``product``) or p / tau (``quotient``). GRPO for L = U = 1.
    """

    name: ClassVar[str] = "grpo_sg"
    source: ClassVar[str] = "arXiv 2511.00066, Eq. 19"

    form: str = choice(
        "product", ("product", "quotient"), "sigmoid(tau*p), or sigmoid(p/tau) as Eq. 19 is printed"
    )

    def before_clip(self, p: Tensor) -> Tensor:
        f = p * self.tau if self.form == "product" else p / self.tau
        return self.alpha * (f.sigmoid() - self.mu)

    def formula(self) -> str:
        inner = "sigmoid(tau*p)" if self.form == "product" else "sigmoid(p/tau)"
        return (
            f"w = clip({self.alpha:g}*({inner} - {self.mu:g}), "
            f"{self.lower:g}, {self.upper:g}), tau = {self.tau:g}"
        )

    @property
    def label(self) -> str:
        return f"{self.name}, {self.form} form"
