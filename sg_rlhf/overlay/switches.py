"""Switches of a run that its workers read from their environment, before they import anything."""

from __future__ import annotations

import os
from typing import Any

#: "0" keeps upstream's path over logits (``actor.fused_logprobs=false``).
FUSED_LOG_PROBS = "SG_FUSED_LOGPROBS"


def fused_log_probs_fit(args: Any) -> bool:
    """Whether the passes of a run can go without logits: not with a head that is cut over ranks,
    nor with a model that is compiled as a whole, with what its head is asked for left out.

    Args:
        args: upstream's nested namespace with ``sg``.
    """
    plain = args.ds.tensor_parallel_size == 1 and not args.ds.deepcompile
    return bool(args.sg.fused_logprobs) and plain


def fused_log_probs() -> bool:
    """Whether this process's passes go without logits."""
    return os.environ.get(FUSED_LOG_PROBS, "1") != "0"
