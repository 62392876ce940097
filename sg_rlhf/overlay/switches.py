"""Switches of a run that its workers read from their environment, before they import anything."""

from __future__ import annotations

import os
from typing import Any

from sg_rlhf.common import without_logits

#: "0" keeps upstream's path over logits (``actor.fused_logprobs=false``).
FUSED_LOG_PROBS = "SG_FUSED_LOGPROBS"
#: "1" lets a prompt stand once in a packed row (``sg.share_prompts``).
SHARE_PROMPTS = "SG_SHARE_PROMPTS"


def fused_log_probs_fit(args: Any) -> bool:
    """Whether the passes of a run go without logits.

    Args:
        args: upstream's nested namespace with ``sg``.
    """
    return without_logits.fits(
        args.sg.fused_logprobs, args.ds.tensor_parallel_size, args.ds.deepcompile
    )


def fused_log_probs() -> bool:
    """Whether this process's passes go without logits."""
    return os.environ.get(FUSED_LOG_PROBS, "1") != "0"


def share_prompts() -> bool:
    """Whether a prompt stands once in this process's packed rows."""
    return os.environ.get(SHARE_PROMPTS, "0") == "1"
