"""The policy's tensors as an engine loads them: plain parameters, with LoRA adapters merged.

The engine holds the plain model. Upstream sends peft's parameters under peft's names, which vLLM
does not know. Here an adapted layer is sent as one tensor, W + scaling * B A. It is merged when it
is sent, in the dtype of W, as peft's ``merge`` does it. Adapters are never sent separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn


class TensorSource(NamedTuple):
    """How a tensor of the engine is computed from the policy's parameters.

    Attributes:
        parameters: the policy's parameters that it depends on; under ZeRO-3 they must be gathered
            around ``materialize``. The first has the tensor's dtype and shape.
        materialize: returns the tensor of their present values.
    """

    parameters: tuple[nn.Parameter, ...]
    materialize: Callable[[], torch.Tensor]


def engine_tensors(model: nn.Module, without_frozen: bool = False) -> dict[str, TensorSource]:
    """Name in the checkpoint -> source, for every tensor of the engine's model, in its order.

    Args:
        model: a causal language model, or one in peft's wrapper.
        without_frozen: omit parameters that take no gradient and have no adapter: the vision part
            of a vision-language model, which the engine has already.
    """
    if not isinstance(model, PeftModel):
        return {
            name: _plain(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or not without_frozen
        }
    base = model.get_base_model()
    adapted = {name: m for name, m in base.named_modules() if isinstance(m, LoraLayer)}
    sources: dict[str, TensorSource] = {}
    for name, parameter in base.named_parameters():
        layer, _, suffix = name.partition(".base_layer.")
        if layer in adapted:
            is_weight = suffix == "weight"
            sources[f"{layer}.{suffix}"] = (
                _merged(adapted[layer], parameter) if is_weight else _plain(parameter)
            )
        elif ".lora_" not in name and (parameter.requires_grad or not without_frozen):
            sources[name] = _plain(parameter)
    return sources


def _plain(parameter: nn.Parameter) -> TensorSource:
    return TensorSource((parameter,), lambda: parameter.data)


def _merged(layer: Any, weight: nn.Parameter) -> TensorSource:
    (adapter,) = layer.active_adapters
    lora = [parameter for name, parameter in layer.named_parameters() if "lora_" in name]

    def materialize() -> torch.Tensor:
        with torch.no_grad():
            merged: torch.Tensor = weight.data + layer.get_delta_weight(adapter).to(weight.dtype)
        return merged

    return TensorSource((weight, *lora), materialize)
