"""What every vLLM engine of this project is started with: rollouts and evaluation alike.

Read in vLLM 0.29.0 and FlashInfer 0.6.18; nothing here has run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

#: Mistral's repositories hold the model twice. vLLM prefers Mistral's own files: other tokenizer
#: code than the trainer's, and a second download of the weights.
HUGGING_FACE_FILES = {"tokenizer_mode": "hf", "config_format": "hf", "load_format": "hf"}
DUAL_CHUNK = "dual_chunk_attention_config"
#: FlashInfer's package of compiled kernels, which its own package has none of.
COMPILED_KERNELS = "flashinfer_jit_cache"


def plain_attention(hf_config: Any) -> Any:
    """Take dual chunk attention out of a model's configuration (vLLM's ``hf_overrides``).

    Qwen2.5-1M's ``config.json`` asks for it. vLLM hands the setting to its attention backends, of
    which none takes it any more, so that the engine does not start. Up to
    ``chunk_size - local_size`` tokens the first chunk holds everything and the attention is the
    plain one, which is also what transformers computes at any length: the context is bounded by
    that, and vLLM refuses a longer ``max_model_len`` by itself.

    Args:
        hf_config: the model's configuration as vLLM has read it; one of its own with nothing but a
            ``model_type`` is passed too.

    Returns:
        The same object. The attribute is deleted: with None vLLM's check of the model's sparse
        attention file fails, and with {} its rotary embedding.
    """
    chunks = getattr(hf_config, DUAL_CHUNK, None)
    if hasattr(hf_config, DUAL_CHUNK):
        delattr(hf_config, DUAL_CHUNK)
    if chunks:
        exact = chunks["chunk_size"] - chunks["local_size"]
        hf_config.max_position_embeddings = min(hf_config.max_position_embeddings, exact)
    return hf_config


def engine_settings(capability: tuple[int, int] | None, compiled_kernels: bool) -> dict[str, Any]:
    """Arguments of any vLLM engine.

    On compute capability 10.x (B200) vLLM prefers FlashInfer's attention without asking for a
    compiler (``platforms/cuda.py``, ``_get_backend_priorities``). FlashInfer's wheel holds sources:
    its kernels are built by nvcc at the first batch, and the fastest ones downloaded
    (``flashinfer/jit/core.py``, ``build_and_load``). vLLM's own FlashAttention, next in its list,
    needs neither.

    Args:
        capability: of the GPUs; None without one.
        compiled_kernels: whether FlashInfer's compiled kernels are installed.
    """
    settings: dict[str, Any] = {"hf_overrides": plain_attention, **HUGGING_FACE_FILES}
    if capability is not None and capability[0] == 10 and not compiled_kernels:
        settings["attention_backend"] = "FLASH_ATTN"
    return settings


def engine_settings_here() -> dict[str, Any]:
    """:func:`engine_settings` of this machine."""
    has_compiled = importlib.util.find_spec(COMPILED_KERNELS) is not None
    return engine_settings(compute_capability(), has_compiled)


def cpu_settings(context: int) -> dict[str, Any]:
    """Arguments of any vLLM engine where there is no GPU.

    Args:
        context: tokens of the longest prompt, which one step must hold.
    """
    return {
        # Compiling costs more than it saves where the model is small enough for a CPU.
        "enforce_eager": True,
        # The CPU's float32 exponential noise can be 0, which picks a token of any probability.
        "use_fp64_gumbel": True,
        # vLLM rewinds the generator of a seeded request whose prompt it has cut in two, and on a
        # CPU that kills the engine ("CPU Generator does not use offset", 0.29.0). So prompts are
        # not cut there, for which a step must hold the longest.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(context, 4096),
        # Of the whole machine's memory; the cache's size is VLLM_CPU_KVCACHE_SPACE instead.
        "gpu_memory_utilization": 0.1,
    }


def cuda_variables() -> dict[str, str]:
    """Variables of any vLLM engine on CUDA; values that the user exported win.

    FlashInfer's sampler of top-p and top-k is compiled too, when the engine warms up
    (``v1/worker/gpu/warmup.py`` samples with both), and without nvcc the engine dies there. vLLM's
    own kernel is Triton's; the recipes sample with neither.
    """
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    return {name: os.environ.get(name, "0")}


def compute_capability() -> tuple[int, int] | None:
    """Of this node's first GPU; None without a driver.

    Asks the driver. vLLM's own question keeps its answer for the process, and would be asked before
    the worker's CUDA_VISIBLE_DEVICES is set; torch's makes a CUDA context.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(first)
        return int(major), int(minor)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
