"""Satisfies upstream's module-level ``import flash_attn`` where flash-attn cannot be built.

``openrlhf/models/ring_attn_utils.py`` imports five helpers when it is loaded, and calls them only
for packed samples or ring attention, which the CPU platform does not offer. Any other flash_attn
module still raises ImportError, so that code which asks for it falls back as if it were absent.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

NAMES = {
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils.distributed": ("all_gather",),
}


def _refuse(name: str) -> Any:
    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"flash_attn's {name} needs CUDA; set ds.packing_samples=false, "
            "ds.ring_attn_size=1 and ds.attn_implementation=sdpa"
        )

    return missing


def install() -> None:
    """Put the stand-in into ``sys.modules`` unless the real package is there."""
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    for name in ("flash_attn", "flash_attn.utils", *NAMES):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        for attribute in NAMES.get(name, ()):
            setattr(module, attribute, _refuse(attribute))
        sys.modules[name] = module
