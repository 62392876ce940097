"""Prepare each Python process for the software GPU (see ../README.md).

Python imports this module at its start because its folder is in PYTHONPATH. So Ray's actors and
vLLM's engine process are prepared too. Each change waits until the module it concerns is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from types import ModuleType


def compute_values(_torch: ModuleType) -> None:
    import software_values

    software_values.install()


def use_pytorch_top_k(sampler: ModuleType) -> None:
    """vLLM's Triton kernel for top-k and top-p does not run in the interpreter."""
    sampler.apply_top_k_top_p_triton = sampler.apply_top_k_top_p_pytorch  # type: ignore[attr-defined]


def share_memory_with_kernels(interpreter: ModuleType) -> None:
    import software_memory

    software_memory.share_memory_with_kernels(interpreter)


def reduce_engine(engine_args: ModuleType) -> None:
    import software_small_engine

    software_small_engine.reduce_engine(engine_args)


def reduce_ray(ray: ModuleType) -> None:
    import software_small_engine

    software_small_engine.reduce_ray(ray)


def install() -> None:
    import wrapt

    after_import = wrapt.register_post_import_hook
    if os.environ.get("SOFTWARE_GPU_VALUES") == "1":
        if "SOFTWARE_GPU_VALUES_LIMIT" not in os.environ:
            os.environ["TRITON_INTERPRET"] = "1"
        after_import(compute_values, "torch")
        after_import(share_memory_with_kernels, "triton.runtime.interpreter")
        after_import(use_pytorch_top_k, "vllm.v1.sample.ops.topk_topp_sampler")
    if os.environ.get("SOFTWARE_GPU_SMALL_ENGINE"):
        after_import(reduce_engine, "vllm.engine.arg_utils")
        after_import(reduce_ray, "ray")


# Other Pythons that the processes start, without PyTorch, need nothing.
if importlib.util.find_spec("torch") is not None:
    try:
        install()
    except Exception:
        # Python would continue after an error here, and every value would be wrong.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
