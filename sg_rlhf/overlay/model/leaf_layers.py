"""Decoder layers as ZeRO-3's leaf modules: one gather of weights per layer.

By default ZeRO-3 has about 15 hooks per layer, whose Python takes most of the time of a small
micro-batch. Gradients do not change; their norm, which adds the parameters in another order, may in
its last digit. So runs without CUDA keep DeepSpeed's hooks, and their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mark_models(stage: int, models: Sequence[Any]) -> None:
    """Mark the layers of upstream's models, or of pairs (model, settings), for ZeRO-3."""
    for entry in models if stage == 3 else ():
        model = entry[0] if isinstance(entry, tuple) else entry
        if model is not None:
            mark(model.model if hasattr(model, "model") else model)


def mark(model: torch.nn.Module) -> int:
    """Mark the decoder layers of a model before DeepSpeed prepares it; their number."""
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    names = {
        name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    layers = [part for part in model.modules() if type(part).__name__ in names]
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return len(layers)
