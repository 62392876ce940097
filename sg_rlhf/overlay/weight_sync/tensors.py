"""The policy's tensors as an engine loads them: a checkpoint's, with LoRA adapters merged.

The engine holds the plain model. An adapted layer is sent as one tensor, W + scaling * B A, merged
in the dtype of W as by peft's ``merge``. transformers 5 stacks the experts of a mixture of experts
when it loads a checkpoint. Here they are split, as it does when it saves one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.core_model_loading import revert_weight_conversion


class TensorSource(NamedTuple):
    """How a tensor of the engine is computed from the policy's parameters.

    Under ZeRO-3 ``parameters`` must be gathered around ``materialize``. The first has the dtype.
    """

    parameters: tuple[nn.Parameter, ...]
    shape: tuple[int, ...]
    materialize: Callable[[], torch.Tensor]


def engine_tensors(model: nn.Module, without_frozen: bool = False) -> dict[str, TensorSource]:
    """Name in the checkpoint -> source, for every tensor of the engine's model, in its order."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return _in_checkpoint_layout(base, _own_tensors(model, base, without_frozen))


def _own_tensors(
    model: nn.Module, base: nn.Module, without_frozen: bool
) -> dict[str, TensorSource]:
    """The tensors by the names of the model's own parameters, with adapters merged."""
    if base is model:
        return {
            name: _plain(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or not without_frozen
        }
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


def _in_checkpoint_layout(
    model: nn.Module, own: dict[str, TensorSource]
) -> dict[str, TensorSource]:
    """Replace tensors that have another layout in a checkpoint, such as stacked experts."""
    layouts: dict[str, dict[str, torch.Tensor]] = {}
    for name, source in own.items():
        empty = torch.empty(source.shape, dtype=source.parameters[0].dtype, device="meta")
        layout = revert_weight_conversion(model, {name: empty})
        is_same = any(tensor is empty for tensor in layout.values())
        layouts[name] = {name: empty} if is_same else layout
    counts = Counter(name for layout in layouts.values() for name in layout)
    sources: dict[str, TensorSource] = {}
    for name, source in own.items():
        layout = layouts[name]
        if name in layout or any(counts[part] > 1 for part in layout):
            sources[name] = source
            continue
        parts = _Parts(model, name, source)
        for part, tensor in layout.items():
            take = functools.partial(parts.take, part)
            sources[part] = TensorSource(source.parameters, tuple(tensor.shape), take)
    return sources


class _Parts:
    """The tensors of a checkpoint that one parameter is made of. All are converted at once."""

    def __init__(self, model: nn.Module, name: str, source: TensorSource) -> None:
        self._model, self._name, self._source = model, name, source
        self._left: dict[str, torch.Tensor] = {}

    def take(self, part: str) -> torch.Tensor:
        """A part. A part that was taken before is converted again, from the present values."""
        if part not in self._left:
            whole = {self._name: self._source.materialize()}
            self._left = revert_weight_conversion(self._model, whole)
        return self._left.pop(part)


def _plain(parameter: nn.Parameter) -> TensorSource:
    return TensorSource((parameter,), _shape(parameter), lambda: parameter.data)


def _merged(layer: Any, weight: nn.Parameter) -> TensorSource:
    (adapter,) = layer.active_adapters
    lora = [parameter for name, parameter in layer.named_parameters() if "lora_" in name]

    def materialize() -> torch.Tensor:
        with torch.no_grad():
            merged: torch.Tensor = weight.data + layer.get_delta_weight(adapter).to(weight.dtype)
        return merged

    return TensorSource((weight, *lora), _shape(weight), materialize)


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The whole shape, also of a parameter that ZeRO-3 has partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
