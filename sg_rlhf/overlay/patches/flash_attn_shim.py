"""Satisfies upstream's module-level ``import flash_attn`` where flash-attn is not installed.

``openrlhf/models/ring_attn_utils.py`` imports five helpers when it is loaded. The four that pack
samples are arithmetic on indices; the fifth serves ring attention, which needs flash-attn itself.
Only the two modules that it names are made, not ``flash_attn`` above them: ``find_spec`` and any
other import find none, so transformers, vLLM and upstream fall back as they do without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import machinery, metadata
from types import ModuleType
from typing import Any, NoReturn

#: The version that openrlhf's metadata pins.
PINNED = "flash-attn==2.8.3"


def installed() -> bool:
    """Whether flash-attn itself is there, compiled here or from a prebuilt wheel."""
    try:
        return bool(metadata.version("flash-attn"))
    except metadata.PackageNotFoundError:
        return False


def absent() -> bool:
    """The contrary."""
    return not installed()


def unpad_input(hidden_states: Any, attention_mask: Any) -> tuple[Any, ...]:
    """``[B, S, ...]`` -> ``[T, ...]`` of its T unmasked tokens, their indices, and the lengths."""
    from transformers import modeling_flash_attention_utils as library

    return library._unpad_input(hidden_states, attention_mask)


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """``[T, ...]`` -> ``[B, S, ...]``, zero where a token is masked."""
    from transformers import modeling_flash_attention_utils as library

    return library._pad_input(hidden_states, indices, batch, seqlen)


def index_first_axis(tensor: Any, indices: Any) -> Any:
    """``[N, ...]`` -> ``[T, ...]``."""
    return tensor[indices]


def rearrange(tensor: Any, pattern: str, **sizes: int) -> Any:
    """flash-attn hands einops' function on."""
    import einops

    return einops.rearrange(tensor, pattern, **sizes)


def all_gather(*_args: object, **_kwargs: object) -> NoReturn:
    """Refuses: ring attention needs flash-attn."""
    raise RuntimeError(f"ring attention needs {PINNED}; set ds.ring_attn_size=1")


#: What upstream imports by name, in the modules it imports them from.
MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "flash_attn.utils.distributed": (all_gather,),
    "flash_attn.bert_padding": (unpad_input, pad_input, index_first_axis, rearrange),
}


def install() -> None:
    """Put the stand-in into ``sys.modules`` unless the real package is there."""
    if installed():
        return
    for name, helpers in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = machinery.ModuleSpec(name, loader=None)
        module.__dict__.update({helper.__name__: helper for helper in helpers})
        sys.modules[name] = module
