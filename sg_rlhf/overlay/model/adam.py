"""DeepSpeed's ``torch_adam`` switch: Adam by ``torch.optim``, so that nothing is compiled.

By default DeepSpeed compiles its Adam at first use: ``fused_adam`` with nvcc, and with
``ds.adam_offload`` ``cpu_adam`` with g++ against a CUDA toolkit of torch's version. ``cpu_adam``
also multiplies up the powers b^t step by step in float32. A resumed process computes them anew,
so its next step is rounded differently. ``torch.optim.AdamW(fused=True)`` has neither problem.

``ds.enable_sleep`` moves ``exp_avg`` and ``exp_avg_sq`` to host memory. torch's Adam has the same
two, but DeepSpeed asserts that the optimizer's class is its own ``FusedAdam``. That name therefore
stands for torch's class. The step count, a tensor of no dimension, stays on the GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from sg_rlhf.common import resources
from sg_rlhf.overlay.cpu import platform

FusedAdam = torch.optim.AdamW
#: Parameters from which a rank without CUDA computes with more than one thread.
THREADED = 50e6


def by_torch(optimizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """The optimizer of DeepSpeed's settings, as torch's fused Adam.

    Args:
        optimizer: ``type`` and ``params``; None for settings without an optimizer.
    """
    if optimizer is None:
        return None
    return {**optimizer, "params": {**optimizer["params"], "torch_adam": True, "fused": True}}


def use_host_threads(ranks: int, parameters: int) -> None:
    """Let this rank compute on its share of the machine's cores, where it computes on the host.

    Ray exports ``OMP_NUM_THREADS=1`` to a worker that asks for less than two CPUs. Upstream's
    workers do, so one core would compute the host Adam of a 3B model (``ds.adam_offload``), and
    without CUDA everything. There a model below :data:`THREADED` keeps its one thread: its small
    products gain nothing, and the number of threads decides how sums are rounded. So does a run
    for which the user exported more.
    """
    if platform.is_cpu() and (parameters < THREADED or torch.get_num_threads() > 1):
        return
    torch.set_num_threads(max(1, resources.cores() // ranks))
