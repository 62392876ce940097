"""Settings of every vLLM engine of this project, for rollouts and for evaluation.

Read in the source of vLLM 0.32.0 and FlashInfer 0.7.0. On GPUs it ran on one H100 and one H200
(docs/gpu.md); tensor parallelism, dual chunk attention and prefix caching did not, nor did the
numbers of sequences and tokens and the graph sizes below.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

#: Mistral's repositories hold the model twice. By default vLLM takes Mistral's own files, which
#: means another tokenizer than the trainer's and a second download of the weights.
HUGGING_FACE_FILES = {"tokenizer_mode": "hf", "config_format": "hf", "load_format": "hf"}
DUAL_CHUNK = "dual_chunk_attention_config"
#: The package with FlashInfer's compiled kernels. FlashInfer's main package has sources only.
COMPILED_KERNELS = "flashinfer_jit_cache"
#: Tokens of a step of a rollout engine on a GPU, as in vLLM's offline engine. In an engine that a
#: program starts vLLM would take 2,048, and prefill a rollout's prompts in four times the steps.
BATCHED_TOKENS = 8192
#: Bytes of a rollout engine's keys and values on a CPU.
CPU_CACHE = 2**29
#: Variables that name the folders of compiled kernels and graphs.
COMPILE_CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")
#: GPUs from this memory on run more sequences, by vLLM's own table (``get_batch_defaults``).
LARGE_GPU_GIB = 70
#: Batch sizes with a CUDA graph; a batch is padded to the next one. vLLM takes 51 up to 512, each
#: captured twice when an engine starts. The cost of a decoding step hardly depends on its padding.
GRAPH_SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
)


def plain_attention(hf_config: Any) -> Any:
    """Remove dual chunk attention from a model's configuration (vLLM's ``hf_overrides``).

    Qwen2.5-1M's ``config.json`` sets it. vLLM passes the setting to its attention backends, but
    none accepts it any more, so the engine would not start. Up to ``chunk_size - local_size``
    tokens everything is in the first chunk and the attention is plain attention, which transformers
    computes at any length. The context is limited to that, and vLLM refuses a longer
    ``max_model_len``.

    Args:
        hf_config: the model's configuration as vLLM read it. vLLM also passes one that has only a
            ``model_type``.

    Returns:
        The same object, without the attribute. (None would break vLLM's check for a sparse
        attention file, and {} its rotary embedding.)
    """
    chunks = getattr(hf_config, DUAL_CHUNK, None)
    if hasattr(hf_config, DUAL_CHUNK):
        delattr(hf_config, DUAL_CHUNK)
    if chunks:
        exact = chunks["chunk_size"] - chunks["local_size"]
        hf_config.max_position_embeddings = min(hf_config.max_position_embeddings, exact)
    return hf_config


def engine_settings(capability: tuple[int, int] | None, compiled_kernels: bool) -> dict[str, Any]:
    """Arguments of every vLLM engine.

    On compute capability 10.x (B200) vLLM prefers FlashInfer's attention and does not check for a
    compiler (``platforms/cuda.py``, ``_get_backend_priorities``). FlashInfer compiles its kernels
    with nvcc at the first batch and downloads the fastest ones (``flashinfer/jit/core.py``,
    ``build_and_load``). vLLM's own FlashAttention, next in its list, needs neither. There it is
    FlashAttention 4, which CuTe-DSL compiles in the process at the first batches of each kind
    (``v1/attention/backends/fa_utils.py``): it needs ptxas of its wheel, and time.

    Args:
        capability: compute capability of the GPUs; None without a GPU.
        compiled_kernels: whether FlashInfer's compiled kernels are installed.
    """
    settings: dict[str, Any] = {"hf_overrides": plain_attention, **HUGGING_FACE_FILES}
    if capability is not None and capability[0] == 10 and not compiled_kernels:
        settings["attention_backend"] = "FLASH_ATTN"
    return settings


def engine_settings_here() -> dict[str, Any]:
    """:func:`engine_settings` for this machine."""
    has_compiled = importlib.util.find_spec(COMPILED_KERNELS) is not None
    gpu = first_gpu()
    return engine_settings(gpu and gpu.capability, has_compiled)


def cpu_settings(context: int, cache_bytes: int = CPU_CACHE) -> dict[str, Any]:
    """Arguments of every vLLM engine on a machine without a GPU.

    Args:
        context: the engine's ``max_model_len``, in tokens.
        cache_bytes: of its keys and values.
    """
    return {
        # A model that is small enough for a CPU does not win back the time to compile it.
        "enforce_eager": True,
        # float32 exponential noise can be 0 on a CPU, which selects a token of any probability.
        "use_fp64_gumbel": True,
        # After chunked prefill vLLM rewinds a seeded request's generator, which fails on a CPU
        # and ends the engine ("CPU Generator does not use offset": `set_offset` in
        # v1/worker/gpu_model_runner.py). Without it, one step must hold the longest prompt.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(context, 4096),
        # VLLM_CPU_KVCACHE_SPACE, in whole GiB, would win. Sequences that do not fit wait.
        "kv_cache_memory_bytes": cache_bytes,
    }


def sequences_at_a_time(gpu_gib: float) -> int:
    """``max_num_seqs`` of a rollout engine: what vLLM's own server takes on such a GPU.

    In an engine that a program starts vLLM would take 128 (``usage_context``). More sequences than
    its cache holds wait, so a large number costs memory for the sampler's logits only.

    Args:
        gpu_gib: memory of a GPU.
    """
    return 1024 if gpu_gib >= LARGE_GPU_GIB else 256


def cuda_settings(gpu_gib: float) -> dict[str, Any]:
    """Arguments of a rollout engine on a GPU; ``vllm.engine_args`` of a recipe wins.

    Args:
        gpu_gib: memory of a GPU.
    """
    return {
        "max_num_seqs": sequences_at_a_time(gpu_gib),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "cudagraph_capture_sizes": list(GRAPH_SIZES),
    }


def cuda_variables() -> dict[str, str]:
    """Environment variables of every vLLM engine on CUDA; the user's own values win.

    vLLM's thread that reports usage over the network is off.

    FlashInfer's sampler for top-p and top-k is compiled when the engine warms up
    (``v1/worker/gpu/warmup.py`` samples with both). vLLM checks the GPU but not for nvcc
    (``flashinfer_sampler_supported``), so without nvcc the engine would fail there. vLLM's own
    kernel uses Triton. No recipe samples with top-p below 1 or with top-k.

    An exported folder for what vLLM and Triton compile is the same on every machine.
    """
    ours = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    caches = {name: os.environ[name] for name in COMPILE_CACHES if name in os.environ}
    return {name: os.environ.get(name, value) for name, value in ours.items()} | caches


class Gpu(NamedTuple):
    """A GPU: compute capability as (major, minor), and memory in GiB."""

    capability: tuple[int, int]
    gib: float


def first_gpu() -> Gpu | None:
    """This node's first GPU; None without a driver.

    From the driver: vLLM caches its answer for the process, before the worker's
    CUDA_VISIBLE_DEVICES is set, and torch would create a CUDA context.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(first)
        total = pynvml.nvmlDeviceGetMemoryInfo(first).total
        return Gpu((int(major), int(minor)), int(total) / 2**30)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
