"""The CPU platform: every difference from CUDA that upstream meets, in one place.

Upstream calls ``torch.cuda`` directly. Where there is no CUDA, those few calls get a CPU meaning:
the functions below, which ``sg_rlhf.overlay.patches.table`` puts in their place. With CUDA nothing
here runs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

#: Set by the driver for every worker, so that workers need not ask torch again.
PLATFORM_VARIABLE = "SG_PLATFORM"

#: Upstream settings that cannot work without CUDA, and what to use instead.
REQUIRED_SETTINGS = {
    "ds.attn_implementation": ("sdpa", "eager"),
    "ds.load_in_4bit": (False,),
    "ds.use_liger_kernel": (False,),
    "ds.ring_attn_size": (1,),
    "ds.tensor_parallel_size": (1,),
    "train.dynamic_batch_enable": (False,),
    "vllm.tensor_parallel_size": (1,),
    "vllm.enable_sleep": (False,),
    "vllm.sync_backend": ("gloo",),
    "vllm.sync_with_ray": (False,),
}


class CpuDevice(str):
    """``torch.cuda.current_device()`` of a machine without CUDA: the device ``cpu``.

    As an argument of ``.to()`` it is "cpu". Formatted into ``f"cuda:{device}"``, as upstream's
    replay buffer does for a device that it then does not use, it is the valid index 0.
    """

    def __format__(self, spec: str) -> str:
        return "0"


def active() -> bool:
    """Whether this process trains without CUDA."""
    named = os.environ.get(PLATFORM_VARIABLE)
    if named:
        return named == "cpu"
    if metadata.version("torch").endswith("+cpu"):  # known without importing it
        return True
    import torch

    return not torch.cuda.is_available()


def on_cuda() -> bool:
    """Whether this process trains on CUDA."""
    return not active()


def environment() -> dict[str, str]:
    """Variables for every Ray worker; values that the user exported win."""
    wanted = {
        PLATFORM_VARIABLE: "cpu",
        "DS_ACCELERATOR": "cpu",
        # Several processes share the cores, and products this small gain nothing from threads
        # that wait for each other. For a larger model export OMP_NUM_THREADS.
        "OMP_NUM_THREADS": "1",
        # vLLM would pin its threads to the cores that the trainer's threads use as well.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The model runs in the engine's own process. In one beside it, each would wait for the
        # other in a loop, on cores that the trainer needs. One engine has one worker here
        # (REQUIRED_SETTINGS), and OMP_NUM_THREADS sets its threads, not vLLM.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # Upstream compiles the entropy anew for every shape of batch: longer than it saves.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def install() -> None:
    """What this process needs before upstream is imported; call it once, early."""
    if active():
        os.environ.update(environment())


# torch.compile's tables want a function object of its own under each name.


def current_device() -> CpuDevice:
    """Of ``torch.cuda``: the CPU."""
    return CpuDevice("cpu")


def current_stream(*_device: Any) -> SimpleNamespace:
    """Of ``torch.cuda``: there is none; its handle is handed on and never used."""
    return SimpleNamespace(cuda_stream=0)


def set_device(_device: Any) -> None:
    """Of ``torch.cuda``: there is one device."""


def empty_cache() -> None:
    """Of ``torch.cuda``: there is no cache."""


def synchronize(_device: Any = None) -> None:
    """Of ``torch.cuda``: nothing runs aside."""


def mesh_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """``init_device_mesh`` where "cuda", which upstream asks for by name, means the CPU."""

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_device_mesh


def skip_shm_build() -> None:
    """Of ``deepspeed.comm.torch``: no shared-memory operator, which nothing we use calls.

    It replaces gloo in ``inference_all_reduce`` alone, which only tensor-parallel layers call, and
    those need CUDA (:data:`REQUIRED_SETTINGS`). 20 seconds of compiling before the first start.
    """


def run_in_process(function: Callable[[], Any]) -> Any:
    """Of vLLM's registry: ask a model class what it supports in this process.

    A process of its own leaves CUDA untouched; without CUDA it imports vLLM again for nothing: 10
    seconds of the first start, and of every start whose home directory keeps no cache.
    """
    return function()


def has_bf16_units() -> bool:
    """Whether this processor multiplies bf16 matrices in hardware."""
    import torch

    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def emulates_bf16() -> bool:
    """Whether this process trains on a processor that computes bf16 products by emulation."""
    return active() and not has_bf16_units()


def dtype_with_fp32(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """``convert_to_torch_dtype`` that knows ``ds.param_dtype=fp32``.

    With neither bf16 nor fp16 in its configuration DeepSpeed trains in float32. Without bf16 units
    that is faster than bf16, and engine and trainer are the same policy to the last digits.
    """
    import torch

    @functools.wraps(original)
    def convert_to_torch_dtype(param_dtype: str) -> Any:
        return torch.float32 if param_dtype == "fp32" else original(param_dtype)

    return convert_to_torch_dtype


def fp16_supported(_accelerator: Any) -> bool:
    """Of DeepSpeed's accelerator. On a CPU it is for trying the recipes of GPUs: slower than bf16,
    and with a loss scale."""
    return True


def multiply_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Linear layers of bf16 weights as float32 products, rounded to bf16 once.

    On a processor without bf16 units torch's bf16 product is emulated: 29 times slower than
    converting for this project's small model, forward and backward (bench/bf16_on_cpu.py). The
    result is the bf16 product with float32 accumulation, which is what hardware units compute too.
    """
    import torch

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if input.dtype != torch.bfloat16:
            return original(input, weight, bias)
        output = input.float() @ weight.float().t()
        if bias is not None:
            output = output + bias.float()
        return output.to(torch.bfloat16)

    return linear


def attend_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' ``sdpa`` attention of bf16 tensors in float32, rounded to bf16 once.

    The same emulation makes torch's bf16 attention three times slower (the same bench). Its public
    registry of attention functions is where a model looks the name up at each call.
    """
    import torch

    @functools.wraps(original)
    def attention(
        layer: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        if query.dtype != torch.bfloat16:
            return original(layer, query, key, value, attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        output, _ = original(
            layer, query.float(), key.float(), value.float(), attention_mask, **kwargs
        )
        return output.to(torch.bfloat16), None

    return attention


def unsupported_settings(value: Any) -> list[str]:
    """One sentence for each setting that cannot work here.

    Args:
        value: a function from a dotted key to its resolved value.
    """
    problems = []
    for key, allowed in REQUIRED_SETTINGS.items():
        if key == "ds.attn_implementation" and value("ds.packing_samples"):
            continue  # replaced: see packed_attention
        if value(key) not in allowed:
            choices = " or ".join(str(a).lower() for a in allowed)
            problems.append(f"{key}={value(key)}: without CUDA use {choices}")
    return problems
