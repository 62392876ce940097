"""Satisfies upstream's module-level ``import flash_attn`` where flash-attn cannot be built.

``openrlhf/models/ring_attn_utils.py`` imports five helpers when it is loaded. The four that pack
samples are arithmetic on indices and work here; the fifth serves ring attention, which the CPU
platform does not offer. Any other flash_attn module still raises ImportError, so that code which
asks for it falls back as if it were absent.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn


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
    """Refuses: ring attention needs CUDA."""
    raise RuntimeError("flash_attn's all_gather needs CUDA; set ds.ring_attn_size=1")


#: What upstream imports by name, in the modules it imports them from.
MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "flash_attn": (),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": (all_gather,),
    "flash_attn.bert_padding": (unpad_input, pad_input, index_first_axis, rearrange),
}


def install() -> None:
    """Put the stand-in into ``sys.modules`` unless the real package is there."""
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    for name, helpers in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        module.__dict__.update({helper.__name__: helper for helper in helpers})
        sys.modules[name] = module
