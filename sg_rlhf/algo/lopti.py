"""Low-probability token isolation (Lopti, arXiv 2505.12929): two updates instead of one.

First the policy is updated on the tokens of a rollout whose old probability is below a threshold,
over the whole rollout, then on the other tokens. Both updates use the same old log-probs,
advantages and denominators. In each of them the other tokens give neither policy gradient nor KL.
The update costs about twice as much.

The paper's threshold, 0.5, is the default here. The authors' code has 0.5 together with AR, and 0.4
for Lopti alone. With threshold 0 or a threshold above 1, one of the updates has no token and is not
made: this is GRPO bit for bit.
"""

from __future__ import annotations

import math

from torch import Tensor

PASSES = ("low", "rest")


def in_pass(old_log_probs_BT: Tensor, threshold: float, name: str) -> Tensor:
    """Bool [B, T]: the tokens of pass ``low`` (p_old < threshold) or ``rest``; else ValueError."""
    if name not in PASSES:
        raise ValueError(f"pass={name!r}: expected one of {', '.join(PASSES)}")
    log_threshold = math.log(threshold) if threshold > 0 else -math.inf
    low_BT = old_log_probs_BT.detach() < log_threshold
    return low_BT if name == "low" else ~low_BT
