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
from typing import Any

import wrapt

#: "0" keeps upstream's bf16 frequencies (``sg.rotary_fp32=false``).
VARIABLE = "SG_ROTARY_FP32"


def install() -> None:
    """Recompute the buffers of every model that upstream's ``Actor`` loads in this process."""
    if os.environ.get(VARIABLE, "1") != "0":
        wrapt.register_post_import_hook(_wrap_actor, "openrlhf.models.actor")


def _wrap_actor(module: Any) -> None:
    original = module.Actor.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        restore(self.model)

    module.Actor.__init__ = init


def restore(model: Any) -> int:
    """Recompute rotary buffers that are not float32; returns how many modules had some.

    Args:
        model: a transformers model; its rotary modules have an ``inv_freq`` buffer and a config.
    """
    import torch

    restored = 0
    for module in model.modules():
        buffer = getattr(module, "inv_freq", None)
        config = getattr(module, "config", None)
        if buffer is None or config is None or buffer.dtype == torch.float32:
            continue
        fresh = type(module)(config)
        for name, value in fresh.named_buffers(recurse=False):
            setattr(module, name, value.to(device=buffer.device, dtype=torch.float32))
        restored += 1
    return restored
