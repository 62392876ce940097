"""The policy's tensors as an engine loads them: plain ones, and LoRA's adapters merged into theirs.

The engine holds the plain model. Upstream sends peft's parameters by peft's names, which vLLM does
not know. Here an adapted layer is one tensor, W + scaling * B A, merged when it is sent and in the
type of W as peft's ``merge`` does it; the adapters' own names are never sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn


class TensorSource(NamedTuple):
    """Where a tensor of the engine comes from.

    Attributes:
        parameters: of the policy; under ZeRO-3 they must be gathered around ``value``. The first
            has the tensor's type and shape.
        value: the tensor, of these parameters as they are now.
    """

    parameters: tuple[nn.Parameter, ...]
    value: Callable[[], torch.Tensor]


def engine_tensors(model: nn.Module, without_frozen: bool = False) -> dict[str, TensorSource]:
    """Every tensor of the engine's model by its name in a checkpoint, in the model's order.

    Args:
        model: a causal language model, or one in peft's wrapper.
        without_frozen: leave parameters out that take no gradient and have no adapter: the vision
            part of a model of images, which the engine has of its own.
    """
    if not isinstance(model, PeftModel):
        return {
            name: TensorSource((parameter,), _value_of(parameter))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or not without_frozen
        }
    plain = model.get_base_model()
    layers = {name: m for name, m in plain.named_modules() if isinstance(m, LoraLayer)}
    found: dict[str, TensorSource] = {}
    for name, parameter in plain.named_parameters():
        layer, _, rest = name.partition(".base_layer.")
        if layer in layers:
            source = _merged(layers[layer], parameter) if rest == "weight" else None
            found[f"{layer}.{rest}"] = source or TensorSource((parameter,), _value_of(parameter))
        elif ".lora_" not in name and (parameter.requires_grad or not without_frozen):
            found[name] = TensorSource((parameter,), _value_of(parameter))
    return found


def _value_of(parameter: nn.Parameter) -> Callable[[], torch.Tensor]:
    return lambda: parameter.data


def _merged(layer: Any, weight: nn.Parameter) -> TensorSource:
    (adapter,) = layer.active_adapters
    own = [parameter for name, parameter in layer.named_parameters() if "lora_" in name]

    def value() -> torch.Tensor:
        with torch.no_grad():
            merged: torch.Tensor = weight.data + layer.get_delta_weight(adapter).to(weight.dtype)
        return merged

    return TensorSource((weight, *own), value)
