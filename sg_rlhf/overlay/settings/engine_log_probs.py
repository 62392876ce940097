"""Whether the rollout engine returns the log-probabilities that it sampled by.

Upstream has it return them, processed by temperature and top-p, where its off-policy correction is
on. Here it does in every run (``sg.engine_log_probs``), so that each rollout's row says how far
engine and trainer are apart; a token weight may read them too (``probability: engine``).
"""

from __future__ import annotations

import os
from typing import Any

#: Tells the engine's process, which is not handed the run's arguments.
VARIABLE = "SG_ENGINE_LOG_PROBS"


def enabled(args: Any) -> bool:
    """Whether the run reads the engine's log-probs, beside a correction of upstream's."""
    return bool(args.sg.engine_log_probs or args.sg.weighting.get("probability") == "engine")


def engine_options() -> dict[str, Any]:
    """What the engine of this process must be started with for it, as upstream does."""
    if os.environ.get(VARIABLE) != "1":
        return {}
    return {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
