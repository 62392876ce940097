"""The CPU platform: replacements of ``torch.cuda`` and others on a machine without CUDA.

:mod:`sg_rlhf.overlay.patches.table` installs them. With CUDA none of them is used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: "cpu" or "cuda". The driver sets it for every worker; a user may set it for the driver.
PLATFORM_VARIABLE = "SG_PLATFORM"

#: Settings of upstream -> the values that work without CUDA.
REQUIRED_SETTINGS = {
    "ds.attn_implementation": ("sdpa", "eager"),
    "ds.load_in_4bit": (False,),
    "ds.use_liger_kernel": (False,),
    "train.dynamic_batch_enable": (False,),
    "vllm.tensor_parallel_size": (1,),
    "vllm.enable_sleep": (False,),
    "vllm.sync_backend": ("gloo",),
}


class CpuDevice(str):
    """``torch.cuda.current_device()`` without CUDA: the device "cpu", in an f-string "0".

    Upstream's replay buffer makes ``f"cuda:{device}"``, which must be a valid name.
    """

    def __format__(self, spec: str) -> str:
        return "0"


def is_cpu() -> bool:
    """Whether this process trains without CUDA."""
    name = os.environ.get(PLATFORM_VARIABLE)
    if name:
        return name == "cpu"
    if metadata.version("torch").endswith("+cpu"):  # known without importing it
        return True
    import torch

    return not torch.cuda.is_available()


def environment() -> dict[str, str]:
    """Environment variables for every process of a CPU run. Values of the user are kept."""
    defaults = {
        PLATFORM_VARIABLE: "cpu",
        "DS_ACCELERATOR": "cpu",
        # Several processes share the cores, and small matrix products gain nothing from threads.
        # The policy of a larger model takes more (model.adam.use_host_threads).
        "OMP_NUM_THREADS": "1",
        # vLLM would pin its threads to cores that the trainer's threads also use.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The model runs in the process of the engine. With two processes, each would wait for the
        # other in a busy loop, on cores that the trainer needs. An engine has one worker here
        # (REQUIRED_SETTINGS), and OMP_NUM_THREADS sets its number of threads.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Huge pages for the heap (glibc). The tensors of a pass are new memory each time, and the
        # kernel's work on 4 KiB pages took a quarter of an update of 135 M parameters.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "TOKENIZERS_PARALLELISM": "false",
        # Upstream compiles the entropy for every shape of batch: that takes longer than it saves.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def install() -> None:
    """Set the environment of this process; call it before upstream is imported."""
    if is_cpu():
        os.environ.update(environment())


# One function per name, because torch.compile's tables need distinct function objects.


def current_device() -> CpuDevice:
    """``torch.cuda.current_device``: the CPU."""
    return CpuDevice("cpu")


def current_stream(*_device: object) -> SimpleNamespace:
    """``torch.cuda.current_stream``: a handle that upstream passes on and never uses."""
    return SimpleNamespace(cuda_stream=0)


def set_device(_device: object) -> None:
    """``torch.cuda.set_device``: does nothing, because there is one device."""


def empty_cache() -> None:
    """``torch.cuda.empty_cache``: does nothing, because there is no cache."""


def synchronize(_device: object = None) -> None:
    """``torch.cuda.synchronize``: does nothing, because nothing runs asynchronously."""


def mesh_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``init_device_mesh``: "cuda", which upstream passes by name, means the CPU."""

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_device_mesh


def skip_shm_build() -> None:
    """``deepspeed.comm.torch.build_shm_op``: does not compile, which takes 20 seconds.

    Only ``inference_all_reduce`` uses it, which needs CUDA (:data:`REQUIRED_SETTINGS`).
    """


def run_in_process(function: Callable[[], Any]) -> Any:
    """``_run_in_subprocess`` of vLLM's model registry, in this process.

    The subprocess leaves CUDA uninitialised. Without CUDA it imports vLLM again: 10 seconds.
    """
    return function()


def has_bf16_units() -> bool:
    """Whether this processor multiplies bf16 matrices in hardware."""
    import torch

    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def emulates_bf16() -> bool:
    """Whether this process trains on a CPU that emulates bf16 products."""
    return is_cpu() and not has_bf16_units()


def dtype_with_fp32(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap ``convert_to_torch_dtype``: it also takes ``ds.param_dtype=fp32``.

    On a CPU without bf16 units float32 is faster, and engine and trainer agree to the last digits.
    """
    import torch

    @functools.wraps(original)
    def convert_to_torch_dtype(param_dtype: str) -> Any:
        return torch.float32 if param_dtype == "fp32" else original(param_dtype)

    return convert_to_torch_dtype


def fp16_supported(_accelerator: object) -> bool:
    """``CPU_Accelerator.is_fp16_supported``: yes, to try the fp16 recipes of GPUs on a CPU."""
    return True


def multiply_in_float32(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a linear layer: bf16 inputs are multiplied in float32 and rounded to bf16 once.

    A CPU without bf16 units emulates torch's bf16 product: 29 times slower for the tiny model. The
    result is the bf16 product with float32 accumulation, as hardware units compute it.
    """
    import torch

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.dtype != torch.bfloat16:
            return original(input, weight, bias)
        output = input.float() @ weight.float().t()
        if bias is not None:
            output = output + bias.float()
        return output.to(torch.bfloat16)

    return linear


def attend_in_float32(
    original: Callable[..., tuple[Tensor, None]],
) -> Callable[..., tuple[Tensor, None]]:
    """Wrap transformers' ``sdpa`` attention likewise; the emulation is three times slower."""
    import torch

    @functools.wraps(original)
    def attention(
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if query.dtype != torch.bfloat16:
            return original(layer, query, key, value, attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        output, _ = original(
            layer, query.float(), key.float(), value.float(), attention_mask, **kwargs
        )
        return output.to(torch.bfloat16), None

    return attention


def unsupported_settings(value: Callable[[str], Any]) -> list[str]:
    """One sentence per setting that does not work without CUDA."""
    problems = []
    for key, allowed in REQUIRED_SETTINGS.items():
        if key == "ds.attn_implementation" and value("ds.packing_samples"):
            continue  # packed samples have one attention; see packed_attention
        if value(key) not in allowed:
            choices = " or ".join(str(a).lower() for a in allowed)
            problems.append(f"{key}={value(key)}: without CUDA use {choices}")
    return problems
