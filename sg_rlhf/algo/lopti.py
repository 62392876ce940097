"""Low-probability token isolation (Lopti, arXiv 2505.12929): two updates in place of one.

The tokens of a rollout whose probability under the policy that sampled them is below a threshold
are updated first, over the whole rollout, and the rest after them. Both updates
use the same old log-probabilities, advantages and denominators; in each of them a token of the
other group gives neither policy gradient nor KL. The update costs about twice as much.

The paper's threshold is 0.5, the default here. The authors' code has 0.5 together with AR, and 0.4
for Lopti alone.

With threshold 0 no token is in the first group: an update without a token is not made, so that
this is GRPO bit for bit. So is any threshold above 1.
"""

from __future__ import annotations

import math

from torch import Tensor

PASSES = ("low", "rest")


def in_pass(old_log_probs_BT: Tensor, threshold: float, name: str) -> Tensor:
    """bool [B, T]: the tokens of pass ``low`` (p_old < threshold) or ``rest``; disjoint, complete.

    Raises ``ValueError`` for another name.
    """
    if name not in PASSES:
        raise ValueError(f"pass={name!r}: expected one of {', '.join(PASSES)}")
    log_threshold = math.log(threshold) if threshold > 0 else -math.inf
    low_BT = old_log_probs_BT.detach() < log_threshold
    return low_BT if name == "low" else ~low_BT
