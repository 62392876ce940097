"""Switches of a run that its workers read from their environment, before they import anything."""

from __future__ import annotations

import os
from typing import Any

from sg_rlhf.common import without_logits

#: "0" keeps upstream's path over logits (``actor.fused_logprobs=false``).
FUSED_LOG_PROBS = "SG_FUSED_LOGPROBS"
#: "1" lets a prompt stand once in a packed row (``sg.share_prompts``).
SHARE_PROMPTS = "SG_SHARE_PROMPTS"
#: "1" lets the engine hand on a reward that is not finite (``sg.on_nonfinite=skip``).
SKIP_NONFINITE = "SG_SKIP_NONFINITE"

#: ``ds.param_dtype``, for the engines, which are not handed the run's arguments.
PARAM_DTYPE = "SG_PARAM_DTYPE"
#: torch's own attention kernel over packed rows, as ``ds.attn_implementation`` names it.
VARLEN = "varlen"
#: ``ds.param_dtype``'s values as vLLM and torch name them.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def fused_log_probs_fit(args: Any) -> bool:
    """Whether the passes of a run go without logits.

    Args:
        args: upstream's nested namespace with ``sg``.
    """
    return without_logits.fits(
        args.sg.fused_logprobs, args.ds.tensor_parallel_size, args.ds.deepcompile
    )


def shared_prompts_fit(args: Any) -> bool:
    """Whether a prompt can stand once in the rows of a run: its attention and its head must know.

    Args:
        args: upstream's nested namespace with ``sg``, fitted to the platform.
    """
    packed = args.ds.packing_samples and args.ds.attn_implementation == VARLEN
    return bool(args.sg.share_prompts and packed and fused_log_probs_fit(args))


def fused_log_probs() -> bool:
    """Whether this process's passes go without logits."""
    return os.environ.get(FUSED_LOG_PROBS, "1") != "0"


def engine_dtype() -> str:
    """What this process's engine holds its weights in, so that it samples as the trainer learns.

    Upstream's is bfloat16 whatever the trainer's is.
    """
    return DTYPES[os.environ.get(PARAM_DTYPE, "bf16")]


def share_prompts() -> bool:
    """Whether a prompt stands once in this process's packed rows."""
    return os.environ.get(SHARE_PROMPTS, "0") == "1"


def skip_nonfinite() -> bool:
    """Whether a sample whose reward is not finite is left out, and does not stop the run."""
    return os.environ.get(SKIP_NONFINITE, "0") == "1"
