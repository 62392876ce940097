"""Decoder layers as ZeRO-3's leaf modules: one gather of weights per layer.

By default ZeRO-3 has hooks on every module of a layer, about 15. Their Python takes most of the
time of a small micro-batch. A leaf module's weights are gathered and released together. Gradients
do not change. Their norm adds the parameters in another order, which may change its last digit;
runs without CUDA therefore keep DeepSpeed's hooks, and their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mark_models(stage: int, models: Sequence[Any]) -> None:
    """Mark the layers of models for ZeRO-3; below it nothing is gathered.

    Args:
        models: upstream's models, or pairs of one and its optimizer's settings; None is left out.
    """
    for entry in models if stage == 3 else ():
        model = entry[0] if isinstance(entry, tuple) else entry
        if model is not None:
            mark(model.model if hasattr(model, "model") else model)


def mark(model: torch.nn.Module) -> int:
    """Mark the decoder layers of a model that DeepSpeed has not prepared yet.

    Returns:
        The number of layers; 0 for a model that names none.
    """
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    names = {
        name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    layers = [part for part in model.modules() if type(part).__name__ in names]
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return len(layers)
