from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sg_rlhf.algo.objectives.base import Clip, Objective, Surrogate, Tokens, by_sign, nowhere
from sg_rlhf.algo.parameters import number


@dataclass(frozen=True, kw_only=True)
class SAPO(Objective):
    """J = w A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft clip (arXiv 2511.20347).

    Gradient in log pi: w r A * 4 s (1 - s) with s = sigmoid(tau (r - 1)): full at r = 1, and never
    quite 0. A constant times A is added, so that on the policy the value is GRPO's, as the gradient
    is; no optimizer sees it.
    """

    name: ClassVar[str] = "sapo"
    source: ClassVar[str] = "arXiv 2511.20347"

    tau_positive: float = number(1.0, "tau for A > 0", above=0.0)
    tau_negative: float = number(1.05, "tau for A <= 0: those fade faster", above=0.0)

    def surrogate(self, tokens: Tokens, clip: Clip) -> Surrogate:
        advantages_BT = tokens.advantages_BT
        tau_BT = by_sign(advantages_BT, self.tau_positive, self.tau_negative)
        gate_BT = (tau_BT * (tokens.ratio_BT - 1)).sigmoid() * (4 / tau_BT) - 2 / tau_BT + 1
        value_BT = tokens.weights_BT * (gate_BT * advantages_BT)
        return Surrogate(value_BT, nowhere(value_BT), nowhere(value_BT), nowhere(value_BT))
