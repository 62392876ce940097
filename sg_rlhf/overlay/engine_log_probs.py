"""Whether the rollout engine returns the log-probabilities that it sampled by.

Upstream has it return them, processed by temperature and top-p, where its off-policy correction is
on. A token weight may read them too (``probability: engine``), without any correction.
"""

from __future__ import annotations

import os
from typing import Any

#: Tells the engine's process, which is not handed the run's arguments.
VARIABLE = "SG_ENGINE_LOG_PROBS"


def wanted(args: Any) -> bool:
    """Whether the run's weighting reads the engine's log-probs."""
    return bool(args.sg.weighting.get("probability") == "engine")


def engine_options() -> dict[str, Any]:
    """What the engine of this process must be started with for it, as upstream does."""
    if os.environ.get(VARIABLE) != "1":
        return {}
    return {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
