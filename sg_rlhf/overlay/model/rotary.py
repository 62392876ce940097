"""Rotary frequencies in float32 under ZeRO-3.

DeepSpeed's ``zero.Init`` converts every float tensor of a bf16 model to bf16, also the rotary
``inv_freq``, which transformers and vLLM keep in float32. In bf16 its entries are off by up to
0.2 %, an angle error that grows with the position: the trainer then scores another model than the
one that sampled. Here the buffers are recomputed after loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def restore(model: torch.nn.Module) -> int:
    """Recompute rotary buffers that are not float32."""
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
