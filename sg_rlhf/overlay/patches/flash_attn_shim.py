"""Satisfies upstream's module-level ``import flash_attn`` where flash-attn is not installed.

``openrlhf/models/ring_attn_utils.py`` imports five helpers: four pack samples, the fifth serves
ring attention. The shim creates only the two modules that upstream names, and not their parent. So
``find_spec`` and all other imports find no flash-attn, and use their fallbacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import machinery, metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

#: The version that openrlhf's metadata pins.
PINNED = "flash-attn==2.8.3"


def installed() -> bool:
    """Whether flash-attn itself is installed, compiled here or from a wheel."""
    try:
        return bool(metadata.version("flash-attn"))
    except metadata.PackageNotFoundError:
        return False


def absent() -> bool:
    """Whether flash-attn is not installed."""
    return not installed()


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Any, ...]:
    """``[B, S, ...]`` -> the T unmasked tokens ``[T, ...]``, their indices, and the lengths."""
    from transformers import modeling_flash_attention_utils as library

    unpadded: tuple[Any, ...] = library._unpad_input(hidden_states, attention_mask)
    return unpadded


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """``[T, ...]`` -> ``[B, S, ...]``, with zeros for masked tokens."""
    from transformers import modeling_flash_attention_utils as library

    padded: Tensor = library._pad_input(hidden_states, indices, batch, seqlen)
    return padded


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Select rows: ``[N, ...]`` and T indices -> ``[T, ...]``."""
    return tensor[indices]


def rearrange(tensor: Tensor, pattern: str, **sizes: int) -> Tensor:
    """``einops.rearrange``, which flash-attn re-exports."""
    import einops

    return einops.rearrange(tensor, pattern, **sizes)


def all_gather(*_args: object, **_kwargs: object) -> NoReturn:
    """Raise: ring attention needs flash-attn."""
    raise RuntimeError(f"ring attention needs {PINNED}; set ds.ring_attn_size=1")


#: Module -> the helpers that upstream imports from it.
MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "flash_attn.utils.distributed": (all_gather,),
    "flash_attn.bert_padding": (unpad_input, pad_input, index_first_axis, rearrange),
}


def install() -> None:
    """Put the modules into ``sys.modules`` unless the real package is installed."""
    if installed():
        return
    for name, helpers in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = machinery.ModuleSpec(name, loader=None)
        module.__dict__.update({helper.__name__: helper for helper in helpers})
        sys.modules[name] = module
