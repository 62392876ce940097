"""Rotary frequencies in float32 under ZeRO-3.

Loading a bf16 model under ZeRO-3 builds it inside DeepSpeed's ``zero.Init``, which makes every
float tensor bf16, the rotary ``inv_freq`` too (transformers keeps it in float32 everywhere else,
and so does vLLM). Its entries are then off by up to 0.2 %, an angle error that grows with the
position: the trainer scores another model than the one that sampled. The buffers are recomputed
here after loading; DeepSpeed leaves float32 buffers alone from then on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

#: "0" keeps upstream's bf16 frequencies (``sg.rotary_fp32=false``).
VARIABLE = "SG_ROTARY_FP32"


def enabled() -> bool:
    """Whether this run's models get their frequencies in float32."""
    return os.environ.get(VARIABLE, "1") != "0"


def with_float32_frequencies(original: Callable[..., None]) -> Callable[..., None]:
    """Upstream's ``Actor.__init__`` that recomputes the buffers of the model it has loaded."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        restore(self.model)

    return init


def restore(model: Any) -> int:
    """Recompute rotary buffers that are not float32; returns how many modules had some.

    Args:
        model: a transformers model; its rotary modules have an ``inv_freq`` buffer and a config.
    """
    import torch

    restored = 0
    for layer in model.modules():
        buffer = getattr(layer, "inv_freq", None)
        config = getattr(layer, "config", None)
        if buffer is None or config is None or buffer.dtype == torch.float32:
            continue
        fresh = type(layer)(config)
        for name, value in fresh.named_buffers(recurse=False):
            setattr(layer, name, value.to(device=buffer.device, dtype=torch.float32))
        restored += 1
    return restored
