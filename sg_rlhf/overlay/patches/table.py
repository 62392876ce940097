"""The table of all names in other packages that the overlay replaces, with the reasons.

No other module of the overlay assigns to a name of upstream, torch, DeepSpeed or transformers. A
row takes effect when its module is imported: in the driver, and in every worker on every node
through Ray's ``worker_process_setup_hook``. A process that never imports the module pays nothing.
A name that the module no longer has is an error when the row is applied.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import wrapt

from sg_rlhf.common import cuda_home
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.model import packed_attention
from sg_rlhf.overlay.patches import flash_attn_shim
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.settings import worker_settings

WORKER_SETUP_HOOK = "sg_rlhf.overlay.patches.table.install"


def _always() -> bool:
    return True


class Patch(NamedTuple):
    """One replaced name."""

    module: str
    name: str
    replacement: str
    why: str
    when: Callable[[], bool] = _always
    wraps: bool = False

    def owner(self) -> tuple[Any, str]:
        """The object that holds ``name`` as attribute or entry, and the last part of ``name``."""
        *parents, last = re.findall(r"\w+", self.name)
        return functools.reduce(getattr, parents, sys.modules[self.module]), last

    def current(self) -> Any:
        """The current value of the name; None for a missing entry of a mapping."""
        owner, last = self.owner()
        return owner.get(last) if self.name.endswith("]") else getattr(owner, last)


_OURS = "sg_rlhf.overlay"
_CPU = f"{_OURS}.cpu.platform"

PATCHES = (
    Patch("transformers.dynamic_module_utils", "get_cached_module_file",
          f"{_OURS}.patches.remote_code:trust_named_repos_only",
          "upstream runs the code of every model", wraps=True),
    Patch("deepspeed.ops.adam.fused_adam", "FusedAdam", f"{_OURS}.model.adam:FusedAdam",
          "ds.enable_sleep asserts this class, and works with torch's as well"),
    # Without flash-attn, which must be compiled.
    Patch("transformers.modeling_utils", f"ALL_ATTENTION_FUNCTIONS[{packed_attention.VARLEN}]",
          f"{_OURS}.model.packed_attention:attention",
          "attention over packed samples by torch's kernel"),
    Patch("openrlhf.models.actor", "log_probs_from_logits",
          "sg_rlhf.algo.log_probs.from_logits:log_probs_from_logits",
          "without flash-attn upstream's allocates the gradient of all logits per 1,024 rows",
          when=flash_attn_shim.absent),
    # With flash-attn.
    Patch("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS[flash_attention_2]",
          f"{_OURS}.model.packed_attention:with_cu_seqlens",
          "looks for the packed samples in every layer, waiting for the GPU three times",
          when=flash_attn_shim.installed, wraps=True),
    # Without CUDA.
    Patch("torch.cuda", "current_device", f"{_CPU}:current_device",
          "upstream puts tensors on the CUDA device", when=platform.is_cpu),
    Patch("torch.cuda", "current_stream", f"{_CPU}:current_stream",
          "upstream passes the stream to the broadcast of the weight sync", when=platform.is_cpu),
    Patch("torch.cuda", "set_device", f"{_CPU}:set_device",
          "upstream calls it in every worker", when=platform.is_cpu),
    Patch("torch.cuda", "empty_cache", f"{_CPU}:empty_cache",
          "upstream calls it between phases", when=platform.is_cpu),
    Patch("torch.cuda", "synchronize", f"{_CPU}:synchronize",
          "upstream calls it at its barriers", when=platform.is_cpu),
    Patch("torch.distributed.device_mesh", "init_device_mesh", f"{_CPU}:mesh_on_cpu",
          "upstream requests a mesh of cuda devices", when=platform.is_cpu, wraps=True),
    Patch("openrlhf.utils.utils", "convert_to_torch_dtype", f"{_CPU}:dtype_with_fp32",
          "accepts bf16 and fp16 only", when=platform.is_cpu, wraps=True),
    Patch("deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator.is_fp16_supported",
          f"{_CPU}:fp16_supported",
          "requires fp16 units, but torch computes in fp16 without them", when=platform.is_cpu),
    Patch("deepspeed.comm.torch", "build_shm_op", f"{_CPU}:skip_shm_build",
          "compiles for 20 seconds an operator of tensor-parallel layers", when=platform.is_cpu),
    Patch("vllm.model_executor.models.registry", "_run_in_subprocess", f"{_CPU}:run_in_process",
          "imports vLLM a second time to leave CUDA uninitialised", when=platform.is_cpu),
    Patch("deepspeed.runtime.zero.partition_parameters", "zero3_linear_wrap",
          f"{_CPU}:multiply_in_float32",
          "bf16 products on a CPU without bf16 units are 29 times slower",
          when=platform.emulates_bf16, wraps=True),
    Patch("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS[sdpa]",
          f"{_CPU}:attend_in_float32",
          "the same for attention", when=platform.emulates_bf16, wraps=True),
)  # fmt: skip

#: Modules of the table that are imported, and the rows that have been applied.
_imported: set[str] = set()
_applied: set[Patch] = set()


def install() -> None:
    """Install the overlay in this process. Ray calls this first in every worker."""
    platform.install()
    flash_attn_shim.install()
    if not platform.is_cpu():
        cuda_home.install()
    if log := worker_settings.current().activity_log:
        activity.write_to(Path(log))
    apply_at_import(PATCHES)


def apply_at_import(patches: Iterable[Patch]) -> None:
    """Apply the rows when their modules are imported, or now if they already are."""
    for patch in patches:
        ours = patch.replacement.partition(":")[0]
        wrapt.register_post_import_hook(functools.partial(_on_upstream, patch), patch.module)
        wrapt.register_post_import_hook(functools.partial(_on_ours, patch), ours)


def _on_upstream(patch: Patch, _module: ModuleType) -> None:
    """Apply a row after the import of its module, or, if our module imports that, after ours."""
    _imported.add(patch.module)
    ours, _, name = patch.replacement.partition(":")
    # Check _applied after the import, which may have applied the row.
    exists = patch.when() and hasattr(importlib.import_module(ours), name)
    if exists and patch not in _applied:
        _apply(patch)


def _on_ours(patch: Patch, _module: ModuleType) -> None:
    if patch not in _applied and patch.module in _imported and patch.when():
        _apply(patch)


def _apply(patch: Patch) -> None:
    ours, _, name = patch.replacement.partition(":")
    replacement = getattr(sys.modules[ours], name)
    try:
        original = patch.current()
    except AttributeError:
        from sg_rlhf.overlay.patches.version import UpstreamChanged

        raise UpstreamChanged(
            f"{patch.module}: {patch.name} no longer exists, but the overlay replaces it"
        ) from None
    if patch.wraps:
        replacement = replacement(original)
    owner, last = patch.owner()
    if patch.name.endswith("]"):
        owner[last] = replacement
    else:
        setattr(owner, last, replacement)
    _applied.add(patch)
